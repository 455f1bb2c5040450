"""Redis for asyncio."""
