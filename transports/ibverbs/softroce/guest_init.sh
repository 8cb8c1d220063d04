#!/bin/bash
# First process of a guest (started by guest.py; never run it by hand). The guest's root is the host's, read-only.
# It runs the job folder's `command`, leaves its exit code in `status` and its output in `log`, and powers off.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin HOME=/root TERM=dumb LANG=C.UTF-8
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t tmpfs tmpfs /run
mkdir -p /dev/shm /dev/pts
mount -t tmpfs tmpfs /dev/shm
mount -t devpts devpts /dev/pts
ln -sf /proc/self/fd /dev/fd
for stream in 0:stdin 1:stdout 2:stderr; do ln -sf "/proc/self/fd/${stream%%:*}" "/dev/${stream#*:}"; done
for word in $(</proc/cmdline); do
    case $word in uccl_job=*) job=${word#uccl_job=} ;; esac
done
mkdir /run/job
mount -t hostfs -o "$job" job /run/job # the one folder of the host that the guest can write
mount -t tmpfs tmpfs /var/tmp
export TMPDIR=/var/tmp
hostname localhost # torch's rendezvous resolves the host's name; an unnamed guest waits for it in vain
ip link set lo up
ulimit -l unlimited
# perftest divides by the clock rate in /proc/cpuinfo, which User-Mode Linux leaves out.
sed 's/^bogomips.*/cpu MHz\t\t: 2000.000\n&/' /proc/cpuinfo >/run/cpuinfo && mount --bind /run/cpuinfo /proc/cpuinfo
bash /run/job/command </dev/null >/run/job/log 2>&1
echo $? >/run/job/status
dmesg >/run/job/dmesg 2>/dev/null
exec busybox poweroff -f # returning from the first process would be a kernel panic
