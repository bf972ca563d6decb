"""The program of this process's rank, which agrees with those of the others, and its connected runtime."""

from __future__ import annotations

from functools import cached_property, partial

import torch

from fxpipe.errors import RunError, number_of
from fxpipe.plan.lanes import ONE_LANE, LaneGroup
from fxpipe.runtime.program.load_program import Program
from fxpipe.runtime.program.offload import default_tier
from fxpipe.runtime.program.rank import Runtime
from fxpipe.runtime.ranks.agreement import check_agreement, check_programs
from fxpipe.runtime.ranks.connect import connect
from fxpipe.runtime.ranks.heap import give_back_large_tensors
from fxpipe.runtime.ranks.local import LocalComm, LocalWorld
from fxpipe.runtime.ranks.replicas import DistributedReplicas, DistributedShards
from fxpipe.training.model.accumulators import new_buckets
from fxpipe.training.model.shards import summing_lanes
from fxpipe.training.run.local_runner import LocalRunner


class RankRunner(LocalRunner):
    """Connects the rank of this process with the others, under torchrun or as the only one."""

    @cached_property
    def runtime(self) -> Runtime:
        """The runtime of this process's rank."""
        plan = self.plan
        if plan.tier is not None and default_tier(self.device) == "disk":
            give_back_large_tensors()
        if self.process is not None:
            offloader = self._offloader(self.process.rank)
            program, is_known = self._checked_program
            # An edited program may not show them.
            collectives = program.collectives(plan.step.halved_lengths) if is_known else []
            comm = connect(
                self.process,
                self.device,
                plan.channels,
                plan.collectives,
                collectives,
                plan.lanes.groups,
                summing_lanes(plan),
            )
            rt = self._runtime_of(self.process.rank, comm, {}, offloader)
            rt.replicas, rt.lanes = comm.abreast, comm.lanes
            rt.summing_lanes = comm.summing_lanes
            if self.state.is_divided:
                rt.replicas = replicas = comm.abreast or DistributedReplicas.alone(comm.wire)
                along: dict[LaneGroup, DistributedReplicas | None] = {ONE_LANE: None, **comm.summing_lanes}
                rt.shards = {group: DistributedShards(replicas, each) for group, each in along.items()}
            if comm.on_streams and (rt.replicas is not None or rt.summing_lanes):
                with self.process.watch.collective():
                    self._exchange_once(rt)
                    if comm.abreast is not None:
                        rt.mean_over_replicas(torch.zeros(1, dtype=torch.float64, device=self.device))
            if comm.lanes is not None:
                comm.lanes.waits = partial(setattr, rt, "waiting")
            return rt
        if plan.ranks * plan.lanes.number > 1:
            lanes = plan.lanes.number
            of_lanes = f" of {lanes} lanes" if lanes > 1 else ""
            raise RunError(
                f"This pipeline has {number_of(plan.ranks, 'rank')}{of_lanes} and this is one process. Start "
                f"the script with torchrun --nproc-per-node {plan.ranks * lanes}, or run all ranks here with "
                "pipe.run_local(batch)."
            )
        return self._runtime_of(0, LocalComm(LocalWorld(1), 0), {}, self._offloader(0))

    def _exchange_once(self, rt: Runtime) -> None:
        """Exchange zeros of the size of each bucket: a communicator connects for each kind and size."""
        buckets = new_buckets(self.state, rt)
        rt.buckets = buckets
        for number, bucket in enumerate(buckets):
            if (group := self.plan.lanes.sums(bucket.names[0])) is not None and not bucket.is_frozen:
                rt.sum_over_lanes(number, group.number, group.stride)
            if not bucket.is_frozen:
                rt.reduce_gradients(number)
            rt.wait_gradients()
            if rt.shards:
                rows = bucket.own_rows() if bucket.is_frozen else bucket.whole
                shards = rt.shards[bucket.division.lanes]
                shards.wait(shards.gather((rows,), bucket.division.begins))
        rt.buckets = ()

    @cached_property
    def _own_program(self) -> Program:
        """The program of this process's rank, after a check that the ranks' programs agree."""
        if self.process is None:
            return self._local_programs[0]
        return self._checked_program[0]

    @cached_property
    def _checked_program(self) -> tuple[Program, bool]:
        """The program of this process's rank, and whether the traffic of all ranks' programs is known."""
        process = self.process
        assert process is not None
        with process.agreed("read its program"):
            program = self._program(process.rank)
        if process.replicas * process.lanes > 1:
            text = self.artifact.programs[process.rank]
            check_programs(text, process.world_rank, process.ranks, process.lanes, process.gather)

        def gather(texts: list[str]) -> list[str]:
            return [data.decode() for data in process.gather_in_replica(texts[0].encode())]

        return program, check_agreement({process.rank: program.traffic}, gather)

    @property
    def _number_in_world(self) -> int:
        """The number of this process, in messages and files."""
        return 0 if self.process is None else self.process.world_rank
