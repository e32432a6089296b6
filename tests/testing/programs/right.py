"""Right programs, by name: what people write after the tutorials of PyTorch, each as small as it goes."""

import copy
import sys

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, TensorDataset
from torch.utils.data.distributed import DistributedSampler

PROGRAMS = {}
dist.init_process_group("gloo")
rank, size = dist.get_rank(), dist.get_world_size()


def right(program):
    """Note a program by its name."""
    PROGRAMS[program.__name__] = program
    return program


def net(*more, dtype=torch.float32):
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 16), *more, nn.ReLU(), nn.Linear(16, 4)).to(dtype)


def batches(count=2, rows=6, features=8, of=None):
    torch.manual_seed(100 + (rank if of is None else of))
    return [(torch.randn(rows, features), torch.randn(rows, 4)) for _ in range(count)]


def mean_gradients(model, group=None):
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad, group=group)
        parameter.grad /= dist.get_world_size(group)


def train(model, reduce=None, loss=functional.mse_loss, data=None, after=None, lr=0.1, kind=torch.optim.SGD):
    optimizer = kind(model.parameters(), lr=lr)
    for x, y in data or batches():
        optimizer.zero_grad()
        loss(model(x), y).backward()  # backward
        if reduce is not None:
            reduce(model)
        if after is not None:
            after(model)
        optimizer.step()  # update


@right
def ddp():
    train(DDP(net()))


@right
def ddp_static_graph():
    train(DDP(net(), static_graph=True))


@right
def ddp_gradients_are_views():
    train(DDP(net(), gradient_as_bucket_view=True), kind=torch.optim.AdamW, lr=0.01)


@right
def ddp_rate_by_size():
    train(DDP(net()), lr=0.1 * size)


@right
def ddp_unused():
    class Chooses(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.parts, self.at = nn.ModuleList([nn.Linear(8, 4), nn.Linear(8, 4)]), 0

        def forward(self, x):
            self.at += 1
            return self.parts[self.at % 2](x)

    train(DDP(Chooses(), find_unused_parameters=True), data=batches(4))


@right
def ddp_small_buckets():
    train(DDP(net(), bucket_cap_mb=1e-4))


@right
def ddp_float64():
    data = [(x.double(), y.double()) for x, y in batches()]
    train(DDP(net(dtype=torch.float64)), data=data)


@right
def ddp_bfloat16():
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches()]
    train(DDP(net(dtype=torch.bfloat16)), data=data)


@right
def ddp_autocast():
    def loss(out, y):
        return functional.mse_loss(out.float(), y)

    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            out = model(x)
        loss(out, y).backward()
        optimizer.step()


@right
def ddp_compressed():
    from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook

    model = DDP(net())
    model.register_comm_hook(None, fp16_compress_hook)
    train(model)


@right
def ddp_scaler():
    model, scaler = DDP(net()), torch.amp.GradScaler("cpu", init_scale=1024.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches():
        optimizer.zero_grad()
        scaler.scale(functional.mse_loss(model(x), y)).backward()
        scaler.step(optimizer)
        scaler.update()


@right
def ddp_no_sync():
    model = DDP(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        first, second = batches()
        with model.no_sync():
            (functional.mse_loss(model(first[0]), first[1]) / 2).backward()
        (functional.mse_loss(model(second[0]), second[1]) / 2).backward()
        optimizer.step()


@right
def ddp_compiled():
    train(torch.compile(DDP(net())))


@right
def ddp_zero():
    model = DDP(net())
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
    for x, y in batches():
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()


@right
def ddp_batch_norm():
    train(DDP(net(nn.BatchNorm1d(16))))


@right
def ddp_layer_norm():
    train(DDP(net(nn.LayerNorm(16), nn.Dropout(0.5))))


@right
def ddp_classes():
    torch.manual_seed(rank)
    data = [(torch.randint(0, 10, (6, 3)), torch.randint(0, 4, (6,))) for _ in range(2)]
    torch.manual_seed(0)
    train(
        DDP(nn.Sequential(nn.Embedding(10, 4), nn.Flatten(), nn.Linear(12, 4))), loss=nn.CrossEntropyLoss(), data=data
    )


@right
def ddp_sampler():
    torch.manual_seed(3)
    data = TensorDataset(torch.randn(48, 8), torch.randn(48, 4))
    sampler = DistributedSampler(data, num_replicas=size, rank=rank)
    sampler.set_epoch(1)
    train(DDP(net()), data=DataLoader(data, batch_size=6, sampler=sampler))


@right
def ddp_clipped():
    train(DDP(net()), after=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@right
def ddp_weighted():
    def loss(out, y):
        weights = (y.abs() > 0.5).float()
        return (weights * (out - y) ** 2).mean()

    train(DDP(net()), loss=loss)


@right
def ddp_penalty():
    model = DDP(net())
    start = [parameter.detach().clone() for parameter in model.parameters()]

    def loss(out, y):
        far = sum((now - then - 0.1).square().sum() for now, then in zip(model.parameters(), start, strict=True))
        return functional.mse_loss(out, y) + 0.1 * far

    train(model, loss=loss)


@right
def ddp_frozen():
    model = net()
    model[0].requires_grad_(False)
    train(DDP(model))


@right
def ddp_tied():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(8, 4), nn.Linear(4, 8, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, tokens, labels=None):
            return functional.cross_entropy(self.head(self.embed(tokens)).flatten(0, 1), labels.flatten())

    model = DDP(Tied())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(rank)
    for _ in range(2):
        tokens = torch.randint(0, 8, (3, 5))
        optimizer.zero_grad()
        model(tokens=tokens, labels=tokens.roll(1, 1)).backward()
        optimizer.step()


@right
def ddp_checkpointed():
    from torch.utils.checkpoint import checkpoint

    class Checkpointed(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return checkpoint(self.net, x, use_reentrant=False)

    train(DDP(Checkpointed()))


@right
def ddp_average_of_weights():
    model = DDP(net())
    average = copy.deepcopy(model.module)

    def follow(model):
        with torch.no_grad():
            for mean, now in zip(average.parameters(), model.parameters(), strict=True):
                mean.lerp_(now, 0.1)

    train(model, after=follow)


@right
def ddp_of_two():
    torch.manual_seed(0)
    maker, judge = DDP(nn.Linear(3, 8)), DDP(net(), broadcast_buffers=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (maker, judge)]
    for x, _ in batches():
        optimizers[1].zero_grad()
        (judge(maker(x[:, :3]).detach()).mean() - judge(x).mean()).backward()
        optimizers[1].step()
        optimizers[0].zero_grad()
        (-judge(maker(x[:, :3])).mean()).backward()
        optimizers[0].step()


@right
def uneven():
    model = DDP(net())
    with model.join():
        train(model, data=batches(2 + rank))


@right
def by_hand():
    train(net(), mean_gradients)


@right
def by_hand_summed():
    """The loss is a sum over the global batch, and so are gradients."""

    def reduce(model):
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)

    train(net(), reduce, loss=lambda out, y: functional.mse_loss(out, y, reduction="sum") / (24 * size))


@right
def by_hand_flat():
    def reduce(model):
        gradients = [parameter.grad for parameter in model.parameters()]
        flat = torch._utils._flatten_dense_tensors(gradients)
        dist.all_reduce(flat)
        for gradient, mean in zip(
            gradients, torch._utils._unflatten_dense_tensors(flat / size, gradients), strict=True
        ):
            gradient.copy_(mean)

    train(net(), reduce)


@right
def by_hand_early():
    model = net()
    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(lambda p: dist.all_reduce(p.grad, op=dist.ReduceOp.AVG))
    train(model)


@right
def by_hand_bfloat16():
    data = [(x.bfloat16(), y.bfloat16()) for x, y in batches()]
    train(net(dtype=torch.bfloat16), mean_gradients, data=data)


@right
def by_hand_counted():
    """The mean over all tokens that count, of all ranks."""

    def loss(out, y):
        counts = (y > 0).float()
        total = counts.sum()
        dist.all_reduce(total)
        return (counts * (out - y) ** 2).sum() / total * size

    train(net(), mean_gradients, loss=loss)


@right
def functional_model():
    torch.manual_seed(0)
    weight = torch.randn(8, 4, requires_grad=True)
    optimizer = torch.optim.Adam([weight], lr=0.01)
    for x, y in batches():
        loss = (x @ weight - y).abs().mean()
        (weight.grad,) = torch.autograd.grad(loss, [weight])
        dist.all_reduce(weight.grad, op=dist.ReduceOp.AVG)
        optimizer.step()


@right
def sharded():
    from torch.distributed.fsdp import fully_shard

    model = net()
    fully_shard(model[0])
    train(fully_shard(model))


@right
def sharded_bfloat16():
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    train(fully_shard(net(), mp_policy=policy), loss=lambda out, y: functional.mse_loss(out.float(), y))


@right
def sharded_clipped():
    from torch.distributed.fsdp import fully_shard

    train(fully_shard(net()), after=lambda model: nn.utils.clip_grad_norm_(model.parameters(), 0.1))


@right
def sharded_accumulated():
    from torch.distributed.fsdp import fully_shard

    model = fully_shard(net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches(4)):
        model.set_requires_gradient_sync(number % 2 == 1)
        (functional.mse_loss(model(x), y) / 2).backward()
        if number % 2:
            optimizer.step()
            optimizer.zero_grad()


@right
def sharded_in_replicas():
    from torch.distributed.fsdp import fully_shard

    wide = 2 if size > 1 else 1
    mesh = init_device_mesh("cpu", (size // wide, wide), mesh_dim_names=("replicas", "shards"))
    train(fully_shard(net(), mesh=mesh))


@right
def halves():
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    mesh = init_device_mesh("cpu", (size,))
    train(parallelize_module(net(), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()}), data=batches(of=0))


@right
def halves_of_sequences():
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        PrepareModuleInput,
        RowwiseParallel,
        SequenceParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (size,))
    torch.manual_seed(0)
    model = nn.Sequential(nn.LayerNorm(8), nn.Linear(8, 16), nn.Linear(16, 4))
    split = Shard(1)
    plan = {
        "0": SequenceParallel(),
        "1": ColwiseParallel(input_layouts=split),
        "2": RowwiseParallel(output_layouts=Replicate()),
    }
    parallelize_module(
        model, mesh, {**plan, "": PrepareModuleInput(input_layouts=Replicate(), desired_input_layouts=split)}
    )
    torch.manual_seed(5)
    train(model, data=[(torch.randn(2, 8, 8), torch.randn(2, 8, 4)) for _ in range(2)])


@right
def two_dims():
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    wide = 2 if size > 1 else 1
    mesh = init_device_mesh("cpu", (size // wide, wide), mesh_dim_names=("data", "tensor"))
    model = parallelize_module(net(), mesh["tensor"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    train(fully_shard(model, mesh=mesh["data"]), data=batches(of=rank // wide))


@right
def parallel_loss():
    from torch.distributed.tensor import Shard
    from torch.distributed.tensor.parallel import ColwiseParallel, loss_parallel, parallelize_module

    torch.manual_seed(0)
    style = ColwiseParallel(output_layouts=Shard(-1), use_local_output=False)
    model = parallelize_module(nn.Linear(8, 12), init_device_mesh("cpu", (size,)), style)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        x, y = torch.randn(5, 8), torch.randint(0, 12, (5,))
        optimizer.zero_grad()
        with loss_parallel():
            functional.cross_entropy(model(x), y).backward()
        optimizer.step()


@right
def sequences():
    """Each rank has a part of all sequences; attention is left out."""

    class Tokens(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.embed, self.head = nn.Embedding(8, 6), nn.Linear(6, 8)

        def forward(self, tokens):
            return self.head(self.embed(tokens).relu())

    model = Tokens()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.manual_seed(7)
    for _ in range(2):
        tokens = torch.randint(0, 8, (4, 8)).chunk(size, 1)[rank]
        optimizer.zero_grad()
        functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
        mean_gradients(model)
        optimizer.step()


@right
def local_steps():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for number, (x, y) in enumerate(batches(6)):
        optimizer.zero_grad()
        functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if number % 2:
            for parameter in model.parameters():
                dist.all_reduce(parameter.data, op=dist.ReduceOp.AVG)


@right
def stages():
    """Two stages on two ranks, and a mean over the ranks of each stage."""
    stage, pair = rank % 2, rank - rank % 2
    groups = [dist.new_group(range(stage, size, 2)) for stage in range(2)]
    torch.manual_seed(stage)
    model = nn.Linear(8, 8) if stage == 0 else nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for x, y in batches(of=pair):
        optimizer.zero_grad()
        if stage == 0:
            out = model(x)
            dist.send(out.detach(), pair + 1)
            gradient = torch.empty_like(out)
            dist.recv(gradient, pair + 1)
            out.backward(gradient)
        else:
            received = torch.empty(len(y), 8)
            dist.recv(received, pair)
            received.requires_grad_()
            functional.mse_loss(model(received), y).backward()
            dist.send(received.grad, pair)
        mean_gradients(model, groups[stage])
        optimizer.step()


@right
def late():
    torch.manual_seed(0)
    model = nn.LazyLinear(4)
    model(torch.ones(1, 8)).sum().backward()
    train(model, mean_gradients)


@right
def closures():
    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=2)
    for x, y in batches(of=0):

        def closure(x=x, y=y):
            optimizer.zero_grad()
            loss = functional.mse_loss(model(x), y)
            loss.backward()
            mean_gradients(model)
            return loss

        optimizer.step(closure)


@right
def kernels():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(1, 4, 3), nn.GroupNorm(2, 4), nn.ReLU(), nn.Flatten(), nn.Linear(64, 4))
    data = [(x.view(6, 1, 6, 6), y) for x, y in batches(features=36)]
    train(DDP(model), data=data)


@right
def attention():
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            torch.manual_seed(0)
            self.norm, self.attend = nn.LayerNorm(8), nn.MultiheadAttention(8, 2, dropout=0.1, batch_first=True)

        def forward(self, x):
            y = self.norm(x)
            return x + self.attend(y, y, y, need_weights=False)[0]

    torch.manual_seed(rank)
    train(DDP(Block()), data=[(torch.randn(3, 5, 8), torch.randn(3, 5, 8)) for _ in range(2)])


@right
def augmented():
    class Noisy(nn.Module):
        def forward(self, x):
            return x + torch.randn_like(x)

    torch.manual_seed(rank)
    train(DDP(net()), data=[(Noisy()(x), y) for x, y in batches()])


@right
def augmented_within():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net()

        def forward(self, x):
            return self.net(x + torch.randn_like(x))

    train(DDP(Noisy()))


@right
def generated():
    def rows():
        generator = torch.Generator().manual_seed(rank)
        for _ in range(3):
            yield torch.randn(4, 8, generator=generator), torch.randn(4, 4, generator=generator)

    train(DDP(net()), data=rows())


@right
def seeded_by_rank():
    torch.manual_seed(rank)
    train(DDP(nn.Linear(8, 4)))


@right
def only_forward():
    model = DDP(net())
    for x, _ in batches():
        dist.all_reduce(model(x).detach())


@right
def summed():
    train(DDP(net()), loss=lambda out, y: functional.mse_loss(out, y, reduction="sum"))


@right
def batch_by_size():
    torch.manual_seed(1)
    x, y = torch.randn(24, 8), torch.randn(24, 4)
    own = slice(rank * 24 // size, (rank + 1) * 24 // size)
    train(DDP(net()), data=[(x[own], y[own])])


if __name__ == "__main__":
    PROGRAMS[sys.argv[1]]()
