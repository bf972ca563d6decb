"""The seconds in which replicas and lanes sum gradients and gather parameters, as formulas have them."""

from __future__ import annotations

import pytest

from fxpipe.cost.devices.cluster import Cluster
from fxpipe.cost.devices.known_devices import device_named
from fxpipe.cost.exchange import Bytes, StageTensors, exchanges

DEVICE = device_named("H100")
SIZE = 800_000_000


def seconds(lanes: int, replicas: int, shard: str, dividing: int) -> tuple[float, float]:
    """Of one stage, whose gradients this many lanes sum."""
    each = Bytes.of([(SIZE, dividing)])
    tensors = {0: StageTensors(each, each, each, each if dividing > 1 else Bytes(0, 0.0))}
    (exchange,) = exchanges(Cluster((DEVICE,)), (0,), tensors, lanes, replicas, shard, False, 1)
    return exchange.sum, exchange.gather


def on(link, size: float, others: int) -> float:
    return others * link.seconds(size / others) if others else 0.0


@pytest.mark.parametrize(("lanes", "replicas", "dividing"), [(1, 4, 1), (4, 1, 4), (8, 1, 2), (4, 2, 4)])
def test_a_lane_gets_what_it_has_not_and_a_replica_of_the_rest(lanes, replicas, dividing):
    intra, inter = DEVICE.intra, DEVICE.inter
    of_lanes = on(intra, SIZE * (1 - 1 / dividing), lanes - 1) if dividing > 1 else 0.0
    whole = on(inter, SIZE * (1 - 1 / replicas), replicas - 1)
    part = on(inter, SIZE / dividing * (1 - 1 / replicas), replicas - 1)
    assert seconds(lanes, replicas, "", dividing) == pytest.approx((2 * of_lanes + 2 * whole, 0.0))
    assert seconds(lanes, replicas, "optimizer", dividing) == pytest.approx((of_lanes + part,) * 2)
    frozen = 2 * SIZE  # gathered as well
    of_lanes_frozen = on(intra, frozen * (1 - 1 / dividing), lanes - 1) if dividing > 1 else 0.0
    frozen_part = on(inter, frozen / dividing * (1 - 1 / replicas), replicas - 1)
    found = seconds(lanes, replicas, "parameters", dividing)
    assert found == pytest.approx((of_lanes + part, of_lanes_frozen + frozen_part))
