# Sourced in a guest: makes rxe0 and siw0. In a single guest rxe0 and rxe1 lie on the two ends of a
# veth, so that their traffic crosses a link that netem can spoil; siw0 is on the loopback. With two
# guests, both rxe0 and siw0 are on vec0, the link between the guests.
if [ -e /sys/class/net/vec0 ]; then
    peer=$((1 - NODE))
    ip link set vec0 address "02:00:00:00:07:0$((NODE + 1))"
    ip link set vec0 mtu 9000 # rxe's largest path MTU, 4096, needs a frame above 4096 bytes
    ip address add "10.7.0.$((NODE + 1))/24" dev vec0
    ip link set vec0 up
    ip neighbour replace "10.7.0.$((peer + 1))" lladdr "02:00:00:00:07:0$((peer + 1))" dev vec0
    rdma link add rxe0 type rxe netdev vec0 && rdma link add siw0 type siw netdev vec0
else
    ip link add veth0 mtu 9000 type veth peer name veth1 mtu 9000
    for end in 0 1; do
        # Both ends are in one network namespace: without these the kernel drops packets that come
        # in with one of its own addresses as the source.
        sysctl -q -w "net.ipv4.conf.veth$end.accept_local=1" "net.ipv4.conf.veth$end.rp_filter=0"
        ip address add "10.9.0.$((end + 1))/32" dev "veth$end"
        ip link set "veth$end" up
    done
    sysctl -q -w net.ipv4.conf.all.rp_filter=0
    for end in 0 1; do
        other=$((1 - end))
        ip neighbour replace "10.9.0.$((other + 1))" lladdr "$(cat /sys/class/net/veth$other/address)" dev "veth$end"
    done
    rdma link add rxe0 type rxe netdev veth0 && rdma link add rxe1 type rxe netdev veth1 &&
        rdma link add siw0 type siw netdev lo
fi
