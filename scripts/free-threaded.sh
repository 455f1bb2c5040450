#!/bin/sh
# Builds a CPython without the GIL under .cache/free-threaded, from Debian's source package, and prints its path. Nothing is installed.
set -eu
cd "$(dirname "$0")/.."
version=3.14.7
digest=3b48dac8fb59f62eaa67ac83c1eb12bda1b7a08406dd286e252c11a66be27f81
folder=$PWD/.cache/free-threaded
python=$folder/bin/python${version%.*}
archive=python${version%.*}_$version.orig.tar.xz
if [ ! -x "$python" ]; then
    mkdir -p "$folder/source"
    /usr/lib/apt/apt-helper download-file "http://deb.debian.org/debian/pool/main/p/python${version%.*}/$archive" "$folder/$archive" "SHA256:$digest" >&2
    tar -xf "$folder/$archive" --strip-components=1 -C "$folder/source"
    (cd "$folder/source" && ./configure -q --disable-gil --prefix="$folder" && make -s -j"$(nproc)" && make -s install) >&2
    rm -rf "$folder/source" "${folder:?}/$archive"
fi
echo "$python"
