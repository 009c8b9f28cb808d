"""What the network daemon says of peers that it cannot reach, in few words."""

from __future__ import annotations

from peers.p2pd_words import why_not_dialled


def test_the_reasons_remain_of_a_dial_that_failed():
    text = (
        "failed to dial: failed to dial 12D3KooWabc: all dials failed\n"
        "  * [/ip4/127.0.0.1/tcp/41] dial tcp4 127.0.0.1:41: connect: connection refused\n"
        "  * [/ip4/10.0.0.1/tcp/41] dial tcp4 10.0.0.1:41: connect: connection refused\n"
        "  * [/ip4/10.0.0.2/tcp/41] dial backoff\n"
    )
    assert why_not_dialled(text) == (
        "connection refused at /ip4/127.0.0.1/tcp/41, /ip4/10.0.0.1/tcp/41; "
        "not reached a moment ago at /ip4/10.0.0.2/tcp/41"
    )


def test_other_words_become_one_line():
    assert why_not_dialled("no addresses\n  known \n") == "no addresses; known"
