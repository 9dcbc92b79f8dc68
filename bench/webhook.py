"""What the webhook costs: reviews per second of one core, and memory. The figures are for reading."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor

from bench.hook import _memory as memory
from bench.hook import _ticks as ticks
from bench.transform import compile_all
from tests.support.webhook import Webhook, asked, review_of, running, vmi

CONNECTIONS = 4
REVIEWS = 10_000
WARM = 1_000
OPTED_IN = {
    "pcinuma.vm.kubevirt.io/enabled": "true",
    "hooks.kubevirt.io/hookSidecars": '[{"image": "registry.example/other:1"}]',
}


def main() -> None:
    compile_all()
    begun = time.monotonic()
    with running() as webhook:
        print(f"from the command to ready                                   {time.monotonic() - begun:8.2f} s")
        print(f"resident when ready                                         {resident(webhook):8.1f} MB")
        load(webhook, WARM)
        before, spent, begun = resident(webhook), ticks(webhook.process.pid), time.monotonic()
        load(webhook, REVIEWS)
        spent, passed = ticks(webhook.process.pid) - spent, time.monotonic() - begun
        print(f"reviews per second of one core                              {REVIEWS / spent:8.0f}")
        print(f"reviews per second here, {CONNECTIONS} connections, client and log beside it {REVIEWS / passed:5.0f}")
        print(f"resident after {WARM + REVIEWS} reviews                                 {resident(webhook):8.1f} MB")
        growth = resident(webhook) - before
        print(f"growth from review {WARM} to {WARM + REVIEWS}                            {growth:8.2f} MB")


def load(webhook: Webhook, reviews: int) -> None:
    """So many reviews of a VM that opts in, over a few connections that are kept."""
    body = json.dumps(review_of(vmi(OPTED_IN)))

    def some(_: int) -> None:
        client = webhook.client()
        for _number in range(reviews // CONNECTIONS):
            answer = asked(client, "POST", "/mutate", body, content_type="application/json")
            assert answer[0] == 200
        client.close()

    with ThreadPoolExecutor(CONNECTIONS) as pool:
        list(pool.map(some, range(CONNECTIONS)))


def resident(webhook: Webhook) -> float:
    """MB."""
    return memory(webhook.process.pid, "VmRSS") / 1e6


if __name__ == "__main__":
    main()
