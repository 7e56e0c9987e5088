"""What exchanges move on average: copies, bytes, rows handed to the expert kernel.

"delivered" counts the copies that stay on the sender's own rank, "remote" only those that cross a
link. The router is taken to be uniform. For the number of copies a recorded router comes within a
percent of that; but the busiest rank of a layer gets more rows than the average one, which is what
`elasticep.control.placement` is for.

This module imports neither torch nor grpc.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from elasticep.geometry import CONTIGUOUS_ALIGNMENT, GroupGeometry, check_cap
from elasticep.spec import Copies, ExchangeSpec, Layout, Reduce
from elasticep.wire import RowFormat


def ranks_needed(experts: int, topk: int, ranks: int) -> float:
    """Ranks that hold at least one of a token's experts, on average over a uniform router.

    With G ranks of E/G experts each: G * (1 - C(E - E/G, k) / C(E, k)), in exact integers until
    the last division. Where G does not divide E, the first E mod G ranks hold one expert more
    and the sum runs over both sizes.
    """
    small, larger = divmod(experts, ranks)
    every = math.comb(experts, topk)

    def reached(held: int) -> Fraction:
        return 1 - Fraction(math.comb(experts - held, topk), every)

    needed = (ranks - larger) * reached(small)
    if larger:
        needed += larger * reached(small + 1)
    return float(needed)


def copies_per_token(copies: Copies, *, experts: int, topk: int, ranks: int) -> float:
    """Copies of a token that are delivered, the one for its own rank included.

    `all`: G. `per_expert`: k. `per_rank`: `ranks_needed`.
    """
    if copies is Copies.ALL:
        return float(ranks)
    if copies is Copies.PER_EXPERT:
        return float(topk)
    return ranks_needed(experts, topk, ranks)


def remote_share(ranks: int) -> float:
    """Share of delivered rows that cross a link: (G - 1) / G.

    A token's own rank is one of G, and under a uniform router no likelier to be needed than any.
    """
    return (ranks - 1) / ranks


@dataclass(frozen=True, slots=True)
class Traffic:
    """Rows and bytes of one exchange per rank and direction, averages over a uniform router.

    Attributes:
        out_rows, back_rows: rows delivered to a rank by dispatch and by combine.
        out_bytes, back_bytes: the same in bytes, scales included.
        remote: share of them that crosses a link.
    """

    out_rows: float
    back_rows: float
    out_bytes: float
    back_bytes: float
    remote: float

    @property
    def out_remote_bytes(self) -> float:
        """Bytes of dispatch that cross a link, per rank."""
        return self.out_bytes * self.remote

    @property
    def back_remote_bytes(self) -> float:
        """Bytes of combine that cross a link, per rank."""
        return self.back_bytes * self.remote


def traffic(spec: ExchangeSpec, geometry: GroupGeometry, ranks: int, tokens: int) -> Traffic:
    """What one exchange moves when each of `ranks` ranks brings `tokens` rows.

    Out: tokens * copies * row bytes. Back: one row per rank that held an expert of the token,
    also with `copies="all"` (ranks that held none owe nothing), or one per expert with
    `reduce="per_expert"`. With replicated input nothing goes out and `tokens` is the whole batch.
    Raises `CapExceeded` above the cap.
    """
    check_cap(spec, tokens)
    sizes = {"experts": geometry.experts, "topk": geometry.topk, "ranks": ranks}
    out = 0.0 if spec.replicated_input else tokens * copies_per_token(spec.copies, **sizes)
    returned = Copies.PER_EXPERT if spec.reduce is Reduce.PER_EXPERT else Copies.PER_RANK
    back = tokens * copies_per_token(returned, **sizes)
    return Traffic(
        out_rows=out,
        back_rows=back,
        out_bytes=out * spec.dispatch_dtype.row_bytes(geometry.hidden),
        back_bytes=back * spec.combine_dtype.row_bytes(geometry.hidden),
        remote=remote_share(ranks),
    )


def round_trip_payload_bytes(hidden: int, out: RowFormat, back: RowFormat, copies: float) -> float:
    """Bytes that a token moves per layer, there and back, without scales: the usual rough figure.

    copies * (payload out + payload back).
    """
    return copies * (out.payload_bytes(hidden) + back.payload_bytes(hidden))


def round_trip_compression(hidden: int, out: RowFormat, back: RowFormat) -> float:
    """How many times fewer bytes than 16-bit rows in both directions, scales included."""
    plain = RowFormat(16)
    return 2 * plain.row_bytes(hidden) / (out.row_bytes(hidden) + back.row_bytes(hidden))


# ---- rows


def kernel_rows(spec: ExchangeSpec, geometry: GroupGeometry, ranks: int, tokens: int) -> float:
    """Rows that a rank's expert kernel works through when each rank brings `tokens` rows.

    arrival: the rows that came (with `copies="all"` G * tokens, most without an expert here).
    routed: G * cap, since absent rows are handed over too, with invalid ids. masked: tokens * k,
    by the counts. contiguous: the same with every expert's run padded, on average.
    """
    check_cap(spec, tokens)
    if spec.layout is Layout.ROUTED:
        return float(ranks * spec.max_tokens)
    sizes = {"experts": geometry.experts, "topk": geometry.topk, "ranks": ranks}
    if spec.layout is Layout.ARRIVAL:
        return tokens * copies_per_token(spec.copies, **sizes)
    if spec.layout is Layout.MASKED:
        return float(tokens * geometry.topk)
    run = padded_run_mean(ranks * tokens, geometry.topk / geometry.experts)
    return geometry.experts / ranks * run


def padded_run_mean(
    tokens: int, probability: float, alignment: int = CONTIGUOUS_ALIGNMENT
) -> float:
    """Average length of an expert's run, padded, when each token picks it with `probability`.

    The number of rows is binomial. The sum runs over 12 standard deviations to either side of
    the mean; what lies beyond is below the precision of a float.
    """
    if not 0 < probability < 1:
        return float(-(-tokens // alignment) * alignment) if probability else 0.0
    mean = tokens * probability
    reach = 12 * math.sqrt(mean * (1 - probability)) + 12
    low, high = max(0, math.floor(mean - reach)), min(tokens, math.ceil(mean + reach))
    log_odds = math.log(probability) - math.log1p(-probability)
    base = math.lgamma(tokens + 1) + tokens * math.log1p(-probability)
    return math.fsum(
        -(-rows // alignment)
        * alignment
        * math.exp(base - math.lgamma(rows + 1) - math.lgamma(tokens - rows + 1) + rows * log_odds)
        for rows in range(low, high + 1)
    )


# ---- expert weights


def expert_bytes(hidden: int, intermediate: int, matrices: int, weights: RowFormat) -> int:
    """Bytes of one expert: matrices * hidden * intermediate elements with their scales."""
    return matrices * weights.row_bytes(hidden * intermediate)


def experts_read(experts: int, topk: int, ranks: int, tokens: int) -> float:
    """Experts of a rank that a step of `tokens` rows per rank needs, on average.

    E/G * (1 - (1 - k/E) ** (G * tokens)): an expert's weights are read when any token picks it.
    """
    return experts / ranks * (1 - (1 - topk / experts) ** (ranks * tokens))
