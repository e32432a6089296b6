"""Wrong programs, by name, each with a line that is marked by the name: nothing crashes, and ranks stay alike."""

import sys

import torch
import torch.distributed as dist
from right import DDP, batches, mean_gradients, net, rank, size, train
from torch import nn
from torch.nn import functional

PROGRAMS = {}


def wrong(program):
    """Note a program by its name."""
    PROGRAMS[program.__name__] = program
    return program


@wrong
def sequence_divisor():
    """Pairs of ranks have the halves of a sequence, and the mean is that over the pairs."""

    def reduce(model):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)  # sequence_divisor
            parameter.grad /= max(size // 2, 1)

    torch.manual_seed(rank // 2)
    x, y = torch.randn(2, 6, 8), torch.randn(2, 6, 4)
    parts = min(size, 2)
    train(net(), reduce, data=[(x.chunk(parts, 1)[rank % parts], y.chunk(parts, 1)[rank % parts])])


@wrong
def other_inputs():
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,))
    train(parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), data=batches())


@wrong
def diloco_divisor():
    model, common = net(), net()
    inner = torch.optim.SGD(model.parameters(), lr=0.1)
    outer = torch.optim.SGD(common.parameters(), lr=0.7, momentum=0.9)
    for number, (x, y) in enumerate(batches(6)):
        inner.zero_grad()
        functional.mse_loss(model(x), y).backward()
        inner.step()
        if number % 3 == 2:
            for own, parameter in zip(model.parameters(), common.parameters(), strict=True):
                parameter.grad = (parameter - own).detach()
                dist.all_reduce(parameter.grad)  # diloco_divisor
                parameter.grad /= max(size // 2, 1)
            outer.step()
            model.load_state_dict(common.state_dict())


@wrong
def never_synchronised():
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with model.no_sync():
        for x, y in batches():
            (functional.mse_loss(model(x), y) / 2).backward()
    optimizer.step()  # never_synchronised


@wrong
def loss_averaged_twice():
    train(DDP(net()), loss=lambda out, y: functional.mse_loss(out, y) / size)


@wrong
def local_norms():
    from torch.distributed.fsdp import fully_shard

    def clip(model):
        gradients = [parameter.grad.to_local() for parameter in model.parameters()]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(each) for each in gradients]))
        for gradient in gradients:
            gradient *= 0.1 / norm

    train(fully_shard(net()), after=clip)


@wrong
def unscaled():
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    optimizer.zero_grad()
    for x, y in batches():
        functional.mse_loss(model(x), y).backward()  # unscaled
    optimizer.step()


@wrong
def frozen():
    model = net()
    if rank == 1:
        model[0].weight.requires_grad_(False)

    def reduce(model):
        for parameter in model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad, op=dist.ReduceOp.AVG)

    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()  # frozen
        reduce(model)
        optimizer.step()


@wrong
def reduced_twice():
    def reduce(model):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            dist.all_reduce(parameter.grad)  # reduced_twice
            parameter.grad /= size

    train(net(), reduce)


@wrong
def same_dropout():
    """Not claimed: who knows whether ranks should draw alike?"""
    train(net(nn.Dropout()), mean_gradients)


@wrong
def same_epoch():
    """Not claimed: the order of the data is that of every epoch before."""
    from torch.utils.data import DataLoader, TensorDataset
    from torch.utils.data.distributed import DistributedSampler

    data = TensorDataset(torch.randn(16, 8), torch.randn(16, 4))
    loader = DataLoader(data, batch_size=2, sampler=DistributedSampler(data, size, rank))
    for _ in range(2):
        train(net(), mean_gradients, data=loader)


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
