"""A bill as JSON and as a table, with the time that stated constants give it."""

import dataclasses
from typing import Any

from .floor import Floor
from .walk import Bill, Part

# An H200, and what a launch costs; a network of 450 GB/s each way (NVLink).
BANDWIDTH = 4.8e12  # bytes a second
PEAK = {"bf16": 800e12, "f16": 800e12, "f32": 60e12, "s8": 1600e12, "f64": 60e12}  # FLOP a second
LANES = 33e12  # elementwise operations a second
LAUNCH, BUFFERED, WAIT = 2.5e-6, 1e-6, 10e-6  # seconds
NETWORK = 450e9  # bytes a second


def product_seconds(products: dict[str, int]) -> float:
    """Seconds of matrix products at the peak of their types."""
    return sum(flop / PEAK.get(dtype, PEAK["f32"]) for dtype, flop in products.items())


def overhead_seconds(part: Part) -> float:
    """Seconds of launches and host waits."""
    plain = part.launches - part.in_buffers
    return plain * LAUNCH + part.in_buffers * BUFFERED + part.waits * WAIT


def seconds(part: Part) -> float:
    """Estimated time: the larger of bytes and products, launches, waits, and what is sent."""
    work = max(part.moved / BANDWIDTH, product_seconds(part.products))
    return work + overhead_seconds(part) + part.sent / NETWORK


def as_json(bill: Bill, least: Floor) -> dict[str, Any]:
    """The account as plain values."""
    total = bill.total
    floor_products = least.total_products / PEAK["bf16"]
    floor_seconds = max(least.total_bytes / BANDWIDTH, floor_products)
    larger = max(total.moved / BANDWIDTH, product_seconds(total.products))
    estimate = sum(map(seconds, bill.parts.values()))
    return {
        "parts": {scope: _part(part) for scope, part in sorted(bill.parts.items())},
        "total": _part(total),
        "floor": {
            "bytes": least.bytes,
            "products": least.products,
            "total_bytes": least.total_bytes,
            "total_products": least.total_products,
            "seconds": floor_seconds,
        },
        "bytes_over_floor": total.moved / least.total_bytes,
        "larger_over_floor": larger / floor_seconds,
        "lower_bound": bill.is_lower_bound,
        "collective_seconds": total.sent / NETWORK,
        "seconds": estimate,
        "share_of_floor": least.total_bytes / BANDWIDTH / estimate,
        "known_turns": bill.known_turns,
        "choices": [dataclasses.asdict(choice) for choice in bill.choices],
        "moves": [dataclasses.asdict(move) for move in bill.moves],
    }


def _part(part: Part) -> dict[str, Any]:
    return {
        **{f.name: getattr(part, f.name) for f in dataclasses.fields(part)},
        "products": dict(part.products),
        "seconds": seconds(part),
    }


def print_bill(found: dict[str, Any]) -> None:
    """The account as a table; a number after >= counts a loop of unknown length once."""
    print(f"  {'scope':<32}{'read':>18}{'written':>18}{'launches':>9}{'graph':>8}{'waits':>7}"
          f"{'GFLOP':>10}{'lanes G':>9}{'ms':>9}")  # fmt: skip
    for scope, part in (*found["parts"].items(), ("total", found["total"])):
        flop = sum(part["products"].values()) / 1e9
        print(f"  {scope:<32}{part['read']:>18,}{part['written']:>18,}{part['launches']:>9,}"
              f"{part['in_buffers']:>8,}{part['waits']:>7,}{flop:>10,.1f}"
              f"{part['lanes'] / 1e9:>9,.1f}{part['seconds'] * 1e3:>9,.2f}")  # fmt: skip
    least = found["floor"]
    for part, count in least["bytes"].items():
        print(f"  floor {part:<26}{count:>18,}{least['products'][part] / 1e9:>60,.1f}")
    mark = ">= " if found["lower_bound"] else ""
    total = found["total"]
    print(f"  bytes / floor {mark}{found['bytes_over_floor']:.3f} "
          f"({total['read'] + total['written']:,} / {least['total_bytes']:,}); larger of bytes and "
          f"products / floor {mark}{found['larger_over_floor']:.3f}")  # fmt: skip
    print(
        f"  estimated {mark}{found['seconds'] * 1e3:.2f} ms, of which collectives "
        f"{found['collective_seconds'] * 1e3:.2f}; memory floor {found['share_of_floor']:.1%}"
    )
    for scope, count in found["known_turns"].items():
        print(f"  loops of known length: {count:,} turns in {scope}")
    for choice in found["choices"]:
        what = "turns of a loop of unknown length" if choice["kind"] == "loop" else "branch"
        print(f"  {what} in {choice['scope']}: {choice['count']:,} ({choice['reason']}), "
              f"{choice['runs']:,} times ({choice['name']})")  # fmt: skip
    for move in sorted(found["moves"], key=lambda m: -m["nbytes"] * m["times"]):
        print(f"  moved in {move['scope']}: {move['origin']} by {move['opcode']}, "
              f"{move['nbytes']:,} bytes x {move['times']:,}")  # fmt: skip
