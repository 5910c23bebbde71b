"""Large all_reduces on an emulated cluster equal the sum of all ranks' tensors, patiently awaited or not."""

import torch
import torch.distributed as dist

import echelon

dist.init_process_group("echelon")
rank, size = dist.get_rank(), dist.get_world_size()
LARGE = 2**18 + 3  # elements, of four bytes patiently awaited; divisible by nothing


def of(member: int, dtype: torch.dtype, count: int) -> torch.Tensor:
    values = torch.randint(-8, 8, (count,), generator=torch.Generator().manual_seed(member))
    return values.to(dtype)


def check(members: list[int], group: dist.ProcessGroup, patient: bool) -> None:
    for dtype in (torch.float32, torch.float64, torch.int64, torch.complex64, torch.bfloat16):
        everyone = torch.stack([of(member, dtype, LARGE) for member in members])
        for op in (dist.ReduceOp.SUM, dist.ReduceOp.MAX, dist.ReduceOp.AVG):
            if (dtype.is_complex and op == dist.ReduceOp.MAX) or (dtype == torch.int64 and op == dist.ReduceOp.AVG):
                continue
            expected = everyone.amax(0) if op == dist.ReduceOp.MAX else everyone.sum(0)
            expected = expected / len(members) if op == dist.ReduceOp.AVG else expected
            x = of(rank, dtype, LARGE)
            with echelon.comm.record() as log:
                work = dist.all_reduce(x, op, group, async_op=rank % 2 == 1)  # each rank's own choice
                if work is not None:
                    work.wait()
            torch.testing.assert_close(x, expected, rtol=0, atol=1e-6 if dtype.is_complex else 0)
            [record] = log
            assert abs(record.wire - 2 * (len(members) - 1) / len(members) * x.nbytes) < 64, record
            if dtype != torch.bfloat16:  # which no library adds
                assert (record.algorithm != "library") == patient, record


check(list(range(size)), dist.group.WORLD, patient=size == 2)
for members, patient in (([0, size - 1], True), ([0, 1, 2], False), ([0, 1], size == 2)):
    if max(members) < size:
        group = dist.new_group(members)
        if rank in members:
            check(members, group, patient)
if rank == 0:
    print("RESULT {}")
dist.destroy_process_group()
