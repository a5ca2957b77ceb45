# First process of a cluster's namespaces (network, mounts, processes): sets them up, then starts what it is asked to
# and reaps what ends. When it is killed the kernel ends everything in the namespaces.
#   $1 state folder, on the host's disk   $2 address of the node   $3 "owned" to end when standard input ends
set -eu
state=$1 address=$2 owned=$3

# Pods with bidirectional mounts need shared propagation; the copy of the host's mounts is ours, nothing goes back.
mount --make-rshared /
# Programs keep their default paths, so these must not be the host's.
for dir in /run /etc/cdi /etc/cni/net.d /var/lib/cni /var/lib/containerd /var/lib/kubelet /var/lib/kube-proxy \
    /opt/divvy /var/log/containers /var/log/pods; do
    mkdir -p "$dir"
    mount -t tmpfs -o mode=755 "divvy-e2e" "$dir"
    mount --make-rshared "$dir"
done

ip link set lo up
ip link add node type bridge
ip address add "$address/24" dev node
ip link set node up
# Without a default route the node itself cannot reach service addresses, which exist only as firewall rules.
ip route add default dev node
echo 1 > /proc/sys/net/ipv4/ip_forward

mkfifo "$state/control"
exec 3<> "$state/control"
if [ "$owned" = owned ]; then
    trap 'exit 0' TERM
    # The end of standard input is the end of the owner, however it ended.
    { cat > /dev/null; kill -TERM 1; } <&0 3>&- &
fi
touch "$state/ready"

while :; do
    read -r -u 3 name || continue
    bash "$state/run/$name.sh" >> "$state/logs/$name.log" 2>&1 < /dev/null 3>&- &
    echo $! > "$state/pids/.$name"
    mv "$state/pids/.$name" "$state/pids/$name"
done
