"""A Redis Cluster: which node has which bucket, and where calls go whose bucket has moved. No I/O."""
