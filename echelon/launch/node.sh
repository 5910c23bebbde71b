# Makes the namespaces it runs in a node (or the head) of an emulated cluster, and holds them until its input ends.
# node.sh NAME FOLDER SHARED…: the folder has the cluster's `hosts`; those shared stay visible if they lie in /dev/shm.
set -e
name=$1 folder=$2
shift 2
read -r process _ </proc/self/stat # as the launcher counts: not for long
mount -t proc proc /proc
mount -t sysfs sysfs /sys # shows this network's interfaces
mount --bind "$folder/hosts" /etc/hosts
if [ -e /etc/nsswitch.conf ]; then # there is nobody to ask for other names: do not try
    sed 's/^hosts:.*/hosts: files/' /etc/nsswitch.conf >"$folder/$name.nsswitch"
    mount --bind "$folder/$name.nsswitch" /etc/nsswitch.conf
fi

# A /dev/shm of its own. It is put together elsewhere, since what is shared could not be seen below it.
memory=$folder/memory
mount -t tmpfs tmpfs "$memory"
for shared in "$@"; do
    case $shared in /dev/shm/*)
        mkdir -p "$memory/${shared#/dev/shm/}"
        mount --bind "$shared" "$memory/${shared#/dev/shm/}"
        ;;
    esac
done
mount --move "$memory" /dev/shm

echo "$name" >/proc/sys/kernel/hostname
for file in /proc/sys/net/ipv6/conf/*/disable_ipv6; do
    [ ! -e "$file" ] || echo 1 >"$file"
done
ip link set lo up

echo "$process" # that all is ready
read -r _ || true
[ "$name" != head ] || rm -rf "$folder"
