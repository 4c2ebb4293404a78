#!/bin/sh
# Tries ./dev where there is only Debian 12 and python3: no pip, no uv, no git, no compiler.
#
#   tools/bare_machine.sh [COMMAND…]      as root; default `run`; needs debootstrap
#
# A new system in a temporary directory, this checkout copied into it, and `./dev COMMAND` as root
# and as nobody: from a cold start, in a path with a space, in an empty environment. How this
# machine reaches its package indexes (apt's sources, pip's settings, its certificates) is copied
# from it. Not part of `./dev test`: it takes a minute, and root.
set -eu

checkout=$(cd -- "$(dirname -- "$0")/.." && pwd -P)
[ $# -ne 0 ] || set -- run
bare=$(mktemp -d)
trap 'rm -rf "$bare"' EXIT
trap 'exit 130' INT
trap 'exit 143' TERM
chmod 755 "$bare"

debootstrap --variant=minbase --include=python3 bookworm "$bare" >"$bare.log" 2>&1 || {
    tail -5 "$bare.log" >&2
    exit 1
}
rm -f "$bare.log"
for file in resolv.conf hosts pip.conf ssl/certs/ca-certificates.crt apt/sources.list apt/sources.list.d; do
    if [ -e "/etc/$file" ]; then
        mkdir -p "$bare/etc/$(dirname "$file")"
        cp -RL "/etc/$file" "$bare/etc/$(dirname "$file")/"
    fi
done

status=0
for user in root nobody; do
    place="/srv/$user's checkout"
    mkdir "$bare$place"
    (cd "$checkout" && tar cf - --exclude=./.git --exclude=./.boot --exclude=./.cache --exclude=./.venv .) |
        tar xf - -C "$bare$place" --no-same-owner
    chown -R "$user:" "$bare$place"
    echo "== ./dev $* as $user"
    start=$(date +%s)
    # A mount namespace of its own, so that /proc and the terminals are gone with the command.
    # shellcheck disable=SC2016 # for the shells inside to expand
    unshare --mount --pid --fork sh -c '
        mount -t proc proc "$1/proc"
        mkdir -p "$1/dev/pts"
        mount -t devpts -o newinstance,ptmxmode=0666 devpts "$1/dev/pts"
        ln -sf pts/ptmx "$1/dev/ptmx"
        bare=$1 user=$2 place=$3
        shift 3
        exec chroot --userspec="$user:" "$bare" /usr/bin/env -i "$place/dev" "$@"
    ' sh "$bare" "$user" "$place" "$@" || status=$?
    echo "== $(($(date +%s) - start)) s as $user"
done
exit "$status"
