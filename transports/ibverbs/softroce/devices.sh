# Sourced in a guest: makes rxe0 and siw0.
#
# One guest: rxe0 and rxe1 lie on the two ends of a veth, so that what they send each other crosses a
# link that netem can spoil. siw0 lies on a dummy interface (not on the loop-back one, whose address
# rdma_cm cannot resolve to a device).
# Two guests: two links between them, rxe0 on vec0 and siw0 on vec1. Not both on one, since rdma_cm
# finds a device by its network interface's address.
wait_for() { # wait_for FILE PATTERN: at most two seconds until the file says so
    local tries
    for tries in {1..200}; do
        grep -qs "$2" $1 && return 0
        sleep 0.01
    done
    echo "devices.sh: $1 does not say $2 after 2 s" >&2
    return 1
}

if [ -e /sys/class/net/vec0 ]; then
    peer=$((1 - NODE))
    siw_on=vec1
    for link in 0 1; do
        ip link set "vec$link" address "02:00:00:00:0$link:0$((NODE + 1))"
        ip address add "10.7.$link.$((NODE + 1))/24" dev "vec$link"
        ip link set "vec$link" up
        ip neighbour replace "10.7.$link.$((peer + 1))" lladdr "02:00:00:00:0$link:0$((peer + 1))" dev "vec$link"
    done
    rdma link add rxe0 type rxe netdev vec0 || return 1
else
    siw_on=dummy0
    ip link add veth0 mtu 9000 type veth peer name veth1 mtu 9000
    sysctl -q -w net.ipv4.conf.all.rp_filter=0
    for end in 0 1; do
        # Both ends are in one network namespace: without these the kernel drops packets that come
        # in with one of its own addresses as the source.
        sysctl -q -w "net.ipv4.conf.veth$end.accept_local=1" "net.ipv4.conf.veth$end.rp_filter=0"
        ip address add "10.9.0.$((end + 1))/32" dev "veth$end"
        ip link set "veth$end" up
    done
    for end in 0 1; do
        other=$((1 - end))
        ip neighbour replace "10.9.0.$((other + 1))" lladdr "$(cat /sys/class/net/veth$other/address)" dev "veth$end"
        rdma link add "rxe$end" type rxe netdev "veth$end" || return 1
    done
    ip address add 10.8.0.1/24 dev dummy0
    ip link set dummy0 mtu 9000 up
fi
rdma link add siw0 type siw netdev $siw_on || return 1
# The kernel fills the address tables a moment later; rdma_cm knows no device before.
for device in /sys/class/infiniband/rxe*; do wait_for "$device/ports/1/gids/1" ffff || return 1; done
wait_for /sys/class/infiniband/siw0/ports/1/state ACTIVE && wait_for /sys/class/infiniband/siw0/ports/1/gids/0 '[1-9a-f]'
