"""The same weights, sent by other libraries, by weightlane's own engines and by plain copies, in turns in one run.

    python -m benchmarks.peers --model qwen3-0.6b --receivers 2 --rounds 5 --json peers.json
    python -m benchmarks.peers --only weightlane,gloo,ray --model tiny     # names, or their beginnings
    python -m benchmarks.peers --list

A round: the sender changes every element (not timed); the exchange lasts from then until the last receiver has the new values in
its own tensors, in place; each receiver's CRC-32 must equal the sender's (not timed), but for plain copies, which go to other
memory. A peer that cannot run here has a row with the reason. The processes are those of `weightlane bench`: each computes with
one thread, and a turn of a peer has processes of its own, which are killed when the turn has ended or a call takes too long.

*trainer blocked* lasts until the sender may change its tensors again. *rollout blocked* is the time for which the slowest
receiver's tensors were in use: from when the data are available where it pulls, the whole transfer where it takes part.
*first round* is cold. *x memcpy-all* is the latency over that of every receiver copying the payload at once, by which rows of
different runs compare; *x fastest peer* is weightlane's over that of the fastest peer through the same medium.
"""
