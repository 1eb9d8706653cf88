#!/bin/sh
# How much sooner a delta is there than a full version when both sides are joined by a slow link:
#
#     benchmarks/sync/slow-link.sh --model qwen3-0.6b --receivers 2 --rounds 2 --out link.json
#
# `weightlane bench` with gloo runs in a network namespace whose loopback carries RATE (tc, token bucket) in all, for weights and
# control messages alike. DELAY=20ms delays every packet, if the kernel has netem. It takes Linux, root, and unshare, ip and tc.
# Nothing is left: the kernel removes the namespace with its last process.
set -eu
rate=${RATE:-1gbit}
for program in unshare ip tc weightlane; do
    command -v "$program" >/dev/null || { echo "slow-link: $program not found (Debian: util-linux, iproute2)" >&2; exit 2; }
done
[ "$(id -u)" = 0 ] || { echo "slow-link: it takes root to make a network namespace" >&2; exit 2; }
limit="tc qdisc add dev lo root handle 1: tbf rate $rate burst 256kb latency 50ms"
[ -z "${DELAY:-}" ] || limit="$limit && tc qdisc add dev lo parent 1:1 netem delay $DELAY"
exec unshare --net sh -c "ip link set lo up && $limit && exec \"\$@\"" sh \
    weightlane bench --engine gloo --codec dense --codec delta --integrity off "$@"
