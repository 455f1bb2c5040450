#!/bin/sh
# Unpacks packages of another Debian release under .cache/NAME, with the libc that they need, and lets their programs start with
# it: scripts/foreign.sh SUITE PACKAGE... Nothing is installed. Prints the folder.
set -eu
cd "$(dirname "$0")/.."
suite=$1; shift
folder=$PWD/.cache/$suite
command -v apt-get >/dev/null && command -v patchelf >/dev/null || { echo "foreign.sh needs Debian's apt-get and patchelf" >&2; exit 1; }
mkdir -p "$folder/apt/lists/partial" "$folder/apt/cache/archives/partial" "$folder/debs"
echo "deb [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] http://deb.debian.org/debian $suite main" > "$folder/apt/sources.list"
: > "$folder/apt/status"    # no package of this release counts as installed
options="-o Dir::State::lists=$folder/apt/lists -o Dir::Cache=$folder/apt/cache -o Dir::Etc::sourcelist=$folder/apt/sources.list -o Dir::Etc::sourceparts=/dev/null -o Dir::State::status=$folder/apt/status -o APT::Sandbox::User=root"
[ -e "$folder/apt/updated" ] || { apt-get $options update -qq >&2; touch "$folder/apt/updated"; }
wanted=$(apt-cache $options depends --recurse --no-recommends --no-suggests --no-conflicts --no-breaks --no-replaces --no-enhances "$@" |
    grep '^[a-z]' | grep -vE '^(debconf|dpkg|perl|init-system-helpers|adduser|passwd|lsb-base|sysvinit-utils|systemd|media-types|mailcap|tzdata|netbase|libpam.*|python3)(:|-|$)' | sort -u)
missing=$(for package in $wanted; do [ -e "$folder/debs/$package" ] || echo "$package"; done)
[ -z "$missing" ] || (cd "$folder/debs" && apt-get $options download -qq $missing >&2)
for package in $missing; do
    dpkg-deb --extract "$folder"/debs/"$package"_*.deb "$folder/root" && rm "$folder"/debs/"$package"_*.deb && touch "$folder/debs/$package"
done
libraries="$folder/root/usr/lib/x86_64-linux-gnu"
loader=$(ls "$libraries"/ld-linux-x86-64.so.2 "$folder"/root/usr/lib64/ld-linux-x86-64.so.2 2>/dev/null | head -1)
for program in "$folder"/root/usr/bin/python3.?? "$folder"/root/usr/bin/*-server "$folder"/root/usr/bin/*-cli "$folder"/root/usr/bin/*-check-rdb "$folder"/root/usr/bin/*-benchmark; do
    [ -f "$program" ] && [ ! -L "$program" ] && [ "$(head -c4 "$program" | tail -c3)" = ELF ] || continue
    [ "$(patchelf --print-interpreter "$program")" = "$loader" ] || patchelf --set-interpreter "$loader" --set-rpath "$libraries" "$program"
done
find "$folder/root/usr/lib/python3."*/lib-dynload -name '*.so' 2>/dev/null | while read -r library; do
    patchelf --set-rpath "$libraries" "$library"
done
echo "$folder/root/usr/bin"
