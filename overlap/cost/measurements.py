"""What was published of collectives on real machines: the rows that the model is fitted to and judged by.

A row that says which figure it fits was used for calibration; the model has not seen the others. Nothing here computes
a prediction: `validation` does.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from .published import Given, Knee, Measurement, Start, Training, Unit


def _rows(
    machine: str,
    ranks: int,
    collective: str,
    unit: Unit,
    source: str,
    figures: Mapping[int, float],
    *,
    fits: Mapping[int, str] | None = None,
    dtype: str = "float32",
    scale: int = 1,
    group: tuple[int, ...] = (),
    beyond: int = 0,
) -> Iterator[Measurement]:
    """Make a row of each size, in units of `scale` bytes, and its figure."""
    for size, figure in figures.items():
        yield Measurement(
            machine=machine,
            ranks=ranks,
            collective=collective,
            nbytes=size * scale,
            beyond_bytes=beyond * scale,
            group=group,
            dtype=dtype,
            figure=figure,
            unit=unit,
            source=source,
            fits=(fits or {}).get(size, ""),
        )


_MIB = 1 << 20
_XPU = "davidshtian/xpu-perf, nccom-test, 2026-03"
_INF2 = "nccom-test on inf2.xlarge, uint8"
_PAIR = "floor of two ranks on one chip"
_TRN1 = "floor of a 32-rank all-gather on trn1.32xlarge"
_P5 = "nccl-tests on p5.48xlarge, algorithm bandwidth"
_DL1 = "EFA Peer Direct on DL1 with Gaudi: hccl_demo network bandwidth at 32 MB"
_ONE_EACH = "nccom-test, one rank and one adapter of each of two nodes"
_OF_2023 = "aws-neuron/aws-neuron-sdk:tools/neuron-sys-tools/nccom-test.rst, 2023"
_KILN = "foxl-ai/kiln:docs/neuron-notes.md"
_INTRANODE = "aws-neuron/aws-neuron-sdk:neuron-runtime/explore/intranode-collective-comm.rst"
_NCCOM = "aws-neuron/aws-neuron-sdk:tools/neuron-sys-tools/nccom-test.rst"


def _dl1(collective: str, host_copies: float, peer_direct: float) -> Iterator[Measurement]:
    for direct, figure in ((False, host_copies), (True, peer_direct)):
        yield Measurement(
            machine="dl1.24xlarge x4",
            ranks=32,
            collective=collective,
            nbytes=32_000_000,
            peer_direct=direct,
            figure=figure,
            unit="nw_bw MB/s",
            source=_DL1,
            fits="fixed cost, adapter share",
        )


_XPU_ALL_GATHER_US = {1: 34.56, 4: 46.77, 16: 121.00, 32: 221.62, 128: 512.58, 512: 1667.02, 2048: 6181.50}
_XPU_REDUCE_SCATTER_US = {1: 30.05, 4: 65.36, 16: 146.61, 32: 252.00, 128: 539.80, 512: 1971.83, 2048: 7805.91}
_XPU_FITS = {32: "wire efficiency", 2048: "memory efficiency"}
_XPU_SCATTER_FITS = {1: "handshake of the ranks"}
_XPU_BF16_ALL_GATHER_US = {4: 47.17, 32: 223.0, 128: 490.97, 512: 1458.72}
_XPU_BF16_REDUCE_SCATTER_US = {4: 65.66, 32: 253.39, 128: 540.16, 512: 1956.72}
_TRN1_PAIR_US = {1 << 16: 43.77, 4 << 20: 517.65, 128 << 20: 21125.0}
_TRN1_PAIR_FITS = {1 << 16: "handshake over the network", 4 << 20: "adapter share"}
_INF2_ALL_REDUCE_US = {1048576: 23.5, 2516582: 50.48, 3984588: 77.85, 5452594: 105.03, 8388608: 160.0}
_INF2_FITS = {8388608: "bytes reduced per second"}
_P5_GB_PER_S = {
    2: {32: 78.57, 128: 162.74, 512: 211.20, 2048: 237.36, 8192: 254.78},
    8: {32: 44.06, 128: 79.40, 512: 138.48, 2048: 141.28, 8192: 180.50},
}
_P5_ALL_GATHER = {2: {64: 213.80, 512: 293.89, 2048: 350.49}, 8: {64: 88.17, 512: 265.41, 2048: 298.37}}
_P5_ALL_TO_ALL = {2: {64: 66.30, 512: 80.87, 2048: 84.53}, 8: {64: 35.24, 512: 47.31, 2048: 50.41}}
# Floors are written as messages of no bytes.
_PAIR_FLOOR = {0: "semaphores of a step"}
_TRN1_FLOOR = {0: "gap between messages"}


def _p5(collective: str, figures: Mapping[int, Mapping[int, float]], fits: Mapping[int, str]) -> Iterator[Measurement]:
    """Make the rows of a collective on two and on eight nodes; figures are fitted to those of two."""
    for nodes, rates in figures.items():
        yield from _rows(
            f"p5.48xlarge x{nodes}",
            8 * nodes,
            collective,
            "algbw GB/s",
            _P5,
            rates,
            fits=fits if nodes == 2 else {},
            scale=_MIB,
        )


COLLECTIVES: tuple[Measurement, ...] = (
    *_rows("trn2.48xlarge", 64, "all_gather", "us", _XPU, _XPU_ALL_GATHER_US, fits=_XPU_FITS, scale=_MIB),
    *_rows(
        "trn2.48xlarge",
        64,
        "reduce_scatter",
        "us",
        _XPU,
        _XPU_REDUCE_SCATTER_US,
        fits=_XPU_SCATTER_FITS,
        scale=_MIB,
    ),
    *_rows("trn2.48xlarge", 64, "all_gather", "us", _XPU, _XPU_BF16_ALL_GATHER_US, dtype="bfloat16", scale=_MIB),
    *_rows(
        "trn2.48xlarge", 64, "reduce_scatter", "us", _XPU, _XPU_BF16_REDUCE_SCATTER_US, dtype="bfloat16", scale=_MIB
    ),
    *_rows("inf2.xlarge", 2, "all_reduce", "us", _INF2, _INF2_ALL_REDUCE_US, fits=_INF2_FITS, dtype="uint8"),
    *_rows("inf2.xlarge", 2, "all_reduce", "us", _PAIR, {0: 4.0}, fits=_PAIR_FLOOR, dtype="uint8"),
    *_rows("trn1.32xlarge", 32, "all_gather", "us", _TRN1, {0: 6.2}, fits=_TRN1_FLOOR),
    *_rows(
        "trn1.32xlarge x2",
        2,
        "all_reduce",
        "us",
        _ONE_EACH,
        _TRN1_PAIR_US,
        fits=_TRN1_PAIR_FITS,
        dtype="uint8",
        group=(0, 32),
    ),
    # Times of 2023 are 2138 and 11,954 us, and 107 and 4750 us: floors fell tenfold since, slopes did not move.
    *_rows("trn1.32xlarge x2", 64, "all_reduce", "us", _OF_2023, {256: 9816.0}, scale=_MIB, beyond=16),
    *_rows("trn1.32xlarge", 2, "all_reduce", "us", _OF_2023, {256: 4643.0}, scale=_MIB, beyond=4, group=(0, 1)),
    *_dl1("all_reduce", 12_110, 21_136),
    *_dl1("reduce_scatter", 9_249, 17_418),
    *_rows("p5.48xlarge x2", 16, "all_reduce", "algbw GB/s", _P5, _P5_GB_PER_S[2], fits={32: "fixed cost"}, scale=_MIB),
    *_rows("p5.48xlarge x8", 64, "all_reduce", "algbw GB/s", _P5, _P5_GB_PER_S[8], scale=_MIB),
    *_p5("all_gather", _P5_ALL_GATHER, {}),
    *_p5("all_to_all", _P5_ALL_TO_ALL, {2048: "adapter share"}),
)
"""Every collective of which a time or a bandwidth is published with its configuration."""


def _starts(
    machine: str, operations: int, figures: Mapping[int, float], fits: Mapping[int, str] | None = None
) -> Iterator[Start]:
    for ranks, figure_ms in figures.items():
        yield Start(
            machine=machine,
            ranks=ranks,
            operations=operations,
            figure_ms=figure_ms,
            source=_KILN,
            fits=(fits or {}).get(ranks, ""),
        )


_NO_COLLECTIVE_MS = {2: 0.086, 4: 0.154, 8: 0.086, 16: 0.145, 32: 0.132, 64: 0.108}
_ONE_MS = {2: 0.150, 4: 1.040, 8: 1.486, 16: 1.982, 32: 2.541, 64: 2.973}
_TWELVE_MS = {2: 0.325, 4: 1.023, 8: 1.484, 16: 2.030, 32: 2.515, 64: 3.214}
_ONE_TRN1_MS = {8: 2.45, 16: 3.76, 32: 5.10}

STARTS: tuple[Start, ...] = (
    *_starts("trn2.48xlarge", 0, _NO_COLLECTIVE_MS, {64: "launch of a program"}),
    *_starts("trn2.48xlarge", 1, _ONE_MS, {4: "barrier of four ranks", 64: "barrier, each doubling"}),
    *_starts("trn2.48xlarge", 12, _TWELVE_MS, {2: "trigger of an operation"}),
    *_starts("trn1.32xlarge", 1, _ONE_TRN1_MS, {32: "barrier, each doubling (trn1)"}),
)
"""Executions of whole programs: launch, barrier, and a few small all-reduces."""


def _knee(
    ranks: int, collectives: Sequence[str], below: str, above: str, bounds: tuple[int, int], seen: str, source: str
) -> Iterator[Knee]:
    for collective in collectives:
        yield Knee(
            machine="trn2.48xlarge",
            ranks=ranks,
            collective=collective,
            below=below,
            above=above,
            least_bytes=bounds[0],
            most_bytes=bounds[1],
            seen=seen,
            source=source,
        )


_NEURON = ("all_gather", "reduce_scatter", "all_reduce")
_DOCUMENTED = "documents say 1 MB, half to twice that is accepted"
_MEASURED = "measured between 32 and 128 MiB, documents say 56 MB"
_SMALL = "seen between 128 KiB and 2 MiB; of which collective is not said"
_LARGE = "seen between 2 and 32 MiB; of which collective is not said"

KNEES: tuple[Knee, ...] = (
    *_knee(64, _NEURON, "mesh", "rdh", (500_000, 2_000_000), _DOCUMENTED, _INTRANODE),
    *_knee(64, _NEURON, "rdh", "kangaring", (32 * _MIB, 128 * _MIB), _MEASURED, f"{_XPU}; {_INTRANODE}"),
    *_knee(16, ["all_reduce"], "mesh", "rdh", (128 << 10, 2 * _MIB), _SMALL, _NCCOM),
    *_knee(16, ["all_reduce"], "rdh", "kangaring", (2 * _MIB, 32 * _MIB), _LARGE, _NCCOM),
)
"""Where documents and measurements see one algorithm take over from another."""

TRAINING = Training(
    machine="dl1.24xlarge x16",
    parameters=5e9,
    itemsize=2,
    host_copies=391.44,
    peer_direct=674.73,
    source="EFA Peer Direct on DL1 with Gaudi: BERT-5B, ZeRO-2, 128 Gaudi",
)
"""The one training run of which throughput is published with a setting on and off."""

GIVEN: tuple[Given, ...] = (
    Given(
        name="start of a DMA",
        figure="1.3 us",
        source="aws-neuron/aws-neuron-sdk:nki/deep-dives/nki-dma-bandwidth-guide.rst",
    ),
    Given(name="NeuronLink hop", figure="1.5 us (of 1 to 2 us)", source=_INTRANODE),
    Given(
        name="EFA hop",
        figure="15 us",
        source="aws-neuron/aws-neuron-sdk:neuron-runtime/explore/internode-collective-comm.rst",
    ),
)
"""Published latencies that are the model's own figures: there is nothing to predict."""
