#!/bin/bash
# runc or crun for pods whose memory of GPUs is capped, on kernels without the controllers by which NVIDIA's driver does that:
# before their hooks run, each of their groups has a twin in a folder, with a list of controllers of the case's choice.
set -eu
runtime=@RUNTIME@
groups=@HOST@/groups # twins of the node's control groups, and the lists of their controllers
proc=@HOST@/proc     # what the node plugin takes for the node's /proc

if [ "${1-}" = hook ]; then
    pid=$(sed -n 's/.*"pid": *\([0-9]*\).*/\1/p')
    # The hierarchy of version 2 where it is mounted; else another one, in which paths are the same.
    path=$(sed -n 's/^0:://p' "/proc/$pid/cgroup")
    case $path in */pod*) ;; *) path=$(sed -n 's/^[0-9]*:pids://p' "/proc/$pid/cgroup") ;; esac
    folder=$groups
    IFS=/
    for part in ${path#/}; do
        folder=$folder/$part
        mkdir -p "$folder"
        # Moved into its place: a plugin may read it meanwhile.
        if [ ! -e "$folder/cgroup.controllers" ]; then
            cp "$groups.of-pods" "$folder/.list.$pid"
            mv "$folder/.list.$pid" "$folder/cgroup.controllers"
        fi
    done
    mkdir -p "$proc/$pid"
    echo "0::$path" > "$proc/$pid/cgroup"
    exit
fi

bundle='' word='' is_gone=''
for next; do
    case $word in --bundle) bundle=$next ;; esac
    case $next in delete) is_gone=yes ;; esac
    word=$next
done
if [ -n "$bundle" ]; then
    # The first of its hooks.
    sed -i "s|\"createRuntime\":\[|&{\"path\":\"$0\",\"args\":[\"groups\",\"hook\"]},|" "$bundle/config.json"
fi
if [ -n "$is_gone" ] && [ -n "$word" ]; then
    find "$groups" -depth -type d -name "$word" -exec rm -r {} \;
fi
case $runtime in
*/crun)
    # That of Debian 12 (1.8.1) takes no version of the specification but this; containerd writes a later one.
    [ -z "$bundle" ] || sed -i 's|"ociVersion":"[^"]*"|"ociVersion":"1.0.2"|' "$bundle/config.json"
    # It works with groups of one version alone, and here are both: those of version 2 are hidden from it.
    both=/sys/fs/cgroup/unified
    if [ -e $both/cgroup.controllers ]; then
        exec unshare --mount sh -c 'umount "$0" && exec "$@"' $both "$runtime" "$@"
    fi
    ;;
esac
exec "$runtime" "$@"
