#!/bin/bash
# network.sh RAILS MTU FAMILY - in the guest: two sides, a and b, and RAILS pairs of virtual Ethernet devices between them, with one
# RDMA device on each:
#
#   nica0 (rxa0) 10.90.0.1 fd90:0::1  ----  10.90.0.2 fd90:0::2 nicb0 (rxb0)
#   nica1 (rxa1) 10.90.1.1 fd90:1::1  ----  10.90.1.2 fd90:1::2 nicb1 (rxb1)    ...
#
# FAMILY 4 gives IPv4 addresses (each device has its link-local IPv6 one too), 6 gives only IPv6 ones. Both sides live in one network
# namespace, as Soft-RoCE wants it; fixed neighbours, and the permission to receive one's own addresses, make packets cross the
# wire, so that `ip link set nica0 down` and `tc qdisc ... netem` act on the RDMA traffic.
set -euo pipefail
rails=$1 mtu=$2 family=$3

set_net() { echo "$2" >"/proc/sys/net/$1"; }
set_net core/rmem_max $((64 << 20))
set_net core/wmem_max $((64 << 20))
for scope in all default; do
  set_net "ipv4/conf/$scope/rp_filter" 0
  set_net "ipv4/conf/$scope/accept_local" 1
  set_net "ipv6/conf/$scope/accept_dad" 0
done

wire() { # ADDRESS ITS_DEVICE OTHER_DEVICE
  ip -6 route del local "$1" dev "$2" table local
  ip -6 route add local "$1" dev "$2" metric 100
  ip -6 route append "$1/128" dev "$3" metric 100
}

for ((i = 0; i < rails; i++)); do
  mac_a=$(printf '02:90:00:00:a0:%02x' "$i") mac_b=$(printf '02:90:00:00:b0:%02x' "$i")
  ip link add "nica$i" address "$mac_a" mtu "$mtu" type veth peer name "nicb$i" address "$mac_b" mtu "$mtu"
  if [ "$family" = 4 ]; then
    ip addr add "10.90.$i.1/24" dev "nica$i"
    ip addr add "10.90.$i.2/24" dev "nicb$i"
  else
    ip addr add "fd90:$i::1/64" dev "nica$i" nodad
    ip addr add "fd90:$i::2/64" dev "nicb$i" nodad
  fi
  ip link set "nica$i" up
  ip link set "nicb$i" up
  if [ "$family" = 4 ]; then
    ip neigh replace "10.90.$i.2" lladdr "$mac_b" dev "nica$i"
    ip neigh replace "10.90.$i.1" lladdr "$mac_a" dev "nicb$i"
  else
    ip neigh replace "fd90:$i::2" lladdr "$mac_b" dev "nica$i"
    ip neigh replace "fd90:$i::1" lladdr "$mac_a" dev "nicb$i"
  fi
  if [ "$family" = 6 ]; then
    # accept_local is IPv4's. Here a route by interface stands before the local one: who sends to the other side's address from its own
    # device finds the cable, who receives finds the address.
    wire "fd90:$i::1" "nica$i" "nicb$i"
    wire "fd90:$i::2" "nicb$i" "nica$i"
  fi
  rdma link add "rxa$i" type rxe netdev "nica$i"
  rdma link add "rxb$i" type rxe netdev "nicb$i"
done
