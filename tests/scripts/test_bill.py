"""The bill of small programs, whose bytes, launches, turns and waits are known by hand."""

import pytest
from conftest import ROOT

# A loop over two groups: each turn cuts a weight out of its stack, multiplies by it, and writes a
# row of a state in place. Behind it, a choice between a cheap and an expensive branch.
HLO = """\
HloModule jit_step, is_scheduled=true

%cut (stack: bf16[2,64,512], group: s32[]) -> bf16[1,64,512] {
  %stack = bf16[2,64,512]{2,1,0} parameter(0)
  %group = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = bf16[1,64,512]{2,1,0} dynamic-slice(%stack, %group, %zero, %zero), \
dynamic_slice_sizes={1,64,512}
}

%put (state: f32[2,4,64], row: f32[4,64], group.1: s32[]) -> f32[2,4,64] {
  %state = f32[2,4,64]{2,1,0} parameter(0)
  %row = f32[4,64]{1,0} parameter(1)
  %update = f32[1,4,64]{2,1,0} bitcast(%row)
  %group.1 = s32[] parameter(2)
  %zero.1 = s32[] constant(0)
  ROOT %dus = f32[2,4,64]{2,1,0} dynamic-update-slice(%state, %update, %group.1, %zero.1, %zero.1)
}

%multiply (x.2: bf16[4,512], w.2: bf16[64,512]) -> f32[4,64] {
  %x.2 = bf16[4,512]{1,0} parameter(0)
  %w.2 = bf16[64,512]{1,0} parameter(1)
  ROOT %dot = f32[4,64]{1,0} dot(%x.2, %w.2), lhs_contracting_dims={1}, rhs_contracting_dims={1}
}

%next (i.3: s32[]) -> s32[] {
  %i.3 = s32[] parameter(0)
  %one = s32[] constant(1)
  ROOT %add = s32[] add(%i.3, %one)
}

%body (carry: (s32[], bf16[4,512], bf16[2,64,512], f32[2,4,64])) -> \
(s32[], bf16[4,512], bf16[2,64,512], f32[2,4,64]) {
  %carry = (s32[], bf16[4,512]{1,0}, bf16[2,64,512]{2,1,0}, f32[2,4,64]{2,1,0}) parameter(0)
  %i = s32[] get-tuple-element(%carry), index=0
  %x = bf16[4,512]{1,0} get-tuple-element(%carry), index=1
  %w = bf16[2,64,512]{2,1,0} get-tuple-element(%carry), index=2
  %s = f32[2,4,64]{2,1,0} get-tuple-element(%carry), index=3
  %slice_fusion.1 = bf16[1,64,512]{2,1,0} fusion(%w, %i), kind=kLoop, calls=%cut, \
metadata={op_name="jit(step)/while/body/layer_0_of_group/mlp/squeeze"}
  %flat = bf16[64,512]{1,0} bitcast(%slice_fusion.1)
  %gemm = f32[4,64]{1,0} fusion(%x, %flat), kind=kCustom, calls=%multiply, \
metadata={op_name="jit(step)/while/body/layer_0_of_group/mlp/...i,oi->...o/dot_general"}
  %put_fusion = f32[2,4,64]{2,1,0} fusion(%s, %gemm, %i), kind=kLoop, calls=%put, \
metadata={op_name="jit(step)/while/body/layer_0_of_group/attention/kda/set"}
  %i.next = s32[] fusion(%i), kind=kLoop, calls=%next
  ROOT %out = (s32[], bf16[4,512]{1,0}, bf16[2,64,512]{2,1,0}, f32[2,4,64]{2,1,0}) \
tuple(%i.next, %x, %w, %put_fusion)
}

%condition (carry.1: (s32[], bf16[4,512], bf16[2,64,512], f32[2,4,64])) -> pred[] {
  %carry.1 = (s32[], bf16[4,512]{1,0}, bf16[2,64,512]{2,1,0}, f32[2,4,64]{2,1,0}) parameter(0)
  %i.1 = s32[] get-tuple-element(%carry.1), index=0
  %limit = s32[] constant(2)
  ROOT %less = pred[] compare(%i.1, %limit), direction=LT
}

%small (y: f32[2,4,64]) -> f32[1024] {
  %y = f32[2,4,64]{2,1,0} parameter(0)
  %part = f32[16]{0} bitcast(%y)
  ROOT %pad = f32[1024]{0} pad(%part, %y), padding=0_1008
}

%large (z: f32[2,4,64]) -> f32[1024] {
  %z = f32[2,4,64]{2,1,0} parameter(0)
  %doubled = f32[2,4,64]{2,1,0} add(%z, %z)
  %again = f32[2,4,64]{2,1,0} multiply(%doubled, %z)
  ROOT %twice = f32[1024]{0} concatenate(%doubled, %again), dimensions={0}
}

ENTRY %main (x0: bf16[4,512], w0: bf16[2,64,512], s0: f32[2,4,64], p: pred[]) -> f32[1024] {
  %x0 = bf16[4,512]{1,0} parameter(0), metadata={op_name="arguments[2]"}
  %w0 = bf16[2,64,512]{2,1,0} parameter(1), \
metadata={op_name="arguments[0][(\\'stacks\\', 1, \\'layers\\', 0, \\'mlp\\', \\'w_up\\')]"}
  %s0 = f32[2,4,64]{2,1,0} parameter(2), metadata={op_name="arguments[1].layers[1][0].memory"}
  %p = pred[] parameter(3)
  %zero.4 = s32[] constant(0)
  %init = (s32[], bf16[4,512]{1,0}, bf16[2,64,512]{2,1,0}, f32[2,4,64]{2,1,0}) \
tuple(%zero.4, %x0, %w0, %s0)
  %loop = (s32[], bf16[4,512]{1,0}, bf16[2,64,512]{2,1,0}, f32[2,4,64]{2,1,0}) while(%init), \
condition=%condition, body=%body, backend_config={"known_trip_count":{"n":"2"}}
  %s1 = f32[2,4,64]{2,1,0} get-tuple-element(%loop), index=3
  ROOT %choice = f32[1024]{0} conditional(%p, %s1, %s1), true_computation=%small, \
false_computation=%large, metadata={op_name="jit(step)/head/cond"}
}
"""
WEIGHT = 64 * 512 * 2  # bytes of one group's weight


@pytest.fixture
def bill(monkeypatch):
    """Modules of scripts/bill by name."""
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    from bill import buffers, hlo, kernels, walk

    return {"buffers": buffers, "hlo": hlo, "kernels": kernels, "walk": walk}


def account(bill, text, **options):
    return bill["walk"].Walk(bill["hlo"].parse(text), **options).bill()


def test_a_slice_an_update_in_place_and_a_product_cost_what_they_touch(bill):
    found = account(bill, HLO)
    mlp, kda = found.parts["mlp"], found.parts["attention/kda"]
    x, out = 4 * 512 * 2, 4 * 64 * 4
    assert mlp.read == 2 * (WEIGHT + 4 + WEIGHT + x)  # the cut with its index, then the product
    assert mlp.written == 2 * (WEIGHT + out)
    assert dict(mlp.products) == {"bf16": 2 * 2 * 4 * 64 * 512}
    assert (kda.read, kda.written) == (2 * (out + 4), 2 * out)  # the row, not the state
    assert (mlp.launches, kda.launches) == (4, 2)
    assert found.known_turns == {"(no scope)": 2}
    assert not found.is_lower_bound


def test_a_weight_that_is_cut_out_of_its_stack_is_named(bill):
    (move,) = account(bill, HLO).moves
    assert (move.origin, move.opcode) == ("stacks.1.layers.0.mlp.w_up", "slice_fusion")
    assert (move.nbytes, move.times, move.scope) == (2 * WEIGHT, 2, "mlp")


def test_a_choice_waits_for_the_host_and_costs_the_branch_that_the_rule_names(bill):
    found = account(bill, HLO)
    (choice,) = found.choices
    assert (choice.kind, choice.count, choice.scope, choice.runs) == ("branch", 0, "head", 1)
    assert found.total.waits == 1
    assert found.parts["head"].waits == 1
    cheap = account(bill, HLO, branch_rule=lambda scope, op: (1, "asked"))
    assert cheap.choices[0].count == 1
    assert found.total.launches - cheap.total.launches == 2  # three kernels for one
    assert found.total.written > cheap.total.written


def test_a_loop_of_unknown_length_waits_and_counts_by_the_rule(bill):
    text = HLO.replace('backend_config={"known_trip_count":{"n":"2"}}', "x=0")
    once = account(bill, text)
    assert once.is_lower_bound
    assert once.parts["mlp"].launches == 2
    ruled = account(bill, text, loop_rule=lambda scope, op: (5, "blocks"))
    assert not ruled.is_lower_bound
    assert ruled.parts["mlp"].launches == 10
    assert ruled.total.waits == 6 + 1  # before each turn, and the one that ends it; the choice
    (loop,) = (choice for choice in ruled.choices if choice.kind == "loop")
    assert (loop.count, loop.reason) == (5, "blocks")


GATHER = """\
HloModule gathers

%fused (table: f32[1000,64], ids: s32[8,1]) -> f32[8,64] {
  %table = f32[1000,64]{1,0} parameter(0)
  %doubled = f32[1000,64]{1,0} add(%table, %table)
  %ids = s32[8,1]{1,0} parameter(1)
  ROOT %rows = f32[8,64]{1,0} gather(%doubled, %ids), offset_dims={1}, slice_sizes={1,64}
}

%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}

%scattered (into: f32[1000,64], at: s32[8,1], rows: f32[8,64]) -> f32[1000,64] {
  %into = f32[1000,64]{1,0} parameter(0)
  %at = s32[8,1]{1,0} parameter(1)
  %rows = f32[8,64]{1,0} parameter(2)
  ROOT %all = f32[1000,64]{1,0} scatter(%into, %at, %rows), to_apply=%sum
}

ENTRY %main (t: f32[1000,64], i: s32[8,1]) -> f32[1000,64] {
  %t = f32[1000,64]{1,0} parameter(0)
  %i = s32[8,1]{1,0} parameter(1)
  %g = f32[8,64]{1,0} fusion(%t, %i), kind=kLoop, calls=%fused
  %sorted = (f32[4096]{0}, s32[4096]{0}) sort(%k, %v), dimensions={0}, to_apply=%less
  %k = f32[4096]{0} iota(), iota_dimension=0
  %v = s32[4096]{0} iota(), iota_dimension=0
  ROOT %s = f32[1000,64]{1,0} fusion(%t, %i, %g), kind=kLoop, calls=%scattered
}
"""


def test_gathers_and_scatters_cost_their_rows_and_sorts_their_passes(bill):
    module = bill["hlo"].parse(GATHER)
    types = {op.name: op for op in module.bodies["main"]}
    cost = {name: bill["kernels"].kernel(module, types[name], types) for name in ("g", "s")}
    rows = 8 * 64 * 4
    assert (cost["g"].reads, cost["g"].written, cost["g"].lanes) == ([rows, 32], rows, 8 * 64)
    assert (cost["s"].reads, cost["s"].written) == ([rows, 32, rows], rows)
    sort = bill["kernels"].kernel(module, types["sorted"], types)
    both = 2 * 4096 * 4
    assert sort.launches == bill["kernels"].sort_passes(4096) == 3  # a tile, its end, a tile
    assert (sort.read, sort.written) == (3 * both, 3 * both)


SEQUENCE = """\
000: kCommandBuffer [source] x
    001: kCopy         [source] kCopy
    002: kCustomKernel [source] wrapped_iota grid
003: kWhile         [prev=000] x
condition:
    004: kCustomKernel [source] loop_compare_fusion grid
  body:
    000: kCommandBuffer [source] x
        005: kDynamicSliceFusion [source] params=1
            006: kCopy [source] kCopy
    007: kCustomKernel [source] late grid
"""


def test_launches_inside_command_buffers_are_told_apart(bill):
    assert bill["buffers"].buffered_ids(SEQUENCE) == [1, 2, 5, 6]
    info = '  thunk_info {\n    profile_annotation: "copy.1"\n    thunk_id: 1\n  }\n'
    thunk = f"thunk_metadata {{\n{info}}}\n"
    assert bill["buffers"].thunk_names(thunk) == {1: "copy.1"}
    buffered = account(bill, HLO, buffered=frozenset(["gemm"]))
    assert buffered.parts["mlp"].in_buffers == 2


def test_the_bill_of_a_step_of_several_programs_counts_each_as_often_as_it_is_called(bill):
    one = account(bill, HLO)
    both = bill["walk"].joined([(one, 1), (one, 22)])
    assert both.total.moved == 23 * one.total.moved
    assert both.total.launches == 23 * one.total.launches
    assert [move.times for move in both.moves] == [
        calls * move.times for calls in (1, 22) for move in one.moves
    ]
    assert sum(loop.runs for loop in both.choices) == 23 * sum(loop.runs for loop in one.choices)


def test_a_program_of_which_nothing_was_buffered_is_told_from_one_that_was_not_dumped(
    bill, tmp_path
):
    with pytest.raises(FileNotFoundError, match="no sequence of launches"):
        bill["buffers"].in_command_buffers(tmp_path)
    (tmp_path / "m.thunk_sequence.txt").write_text(SEQUENCE)
    assert bill["buffers"].in_command_buffers(tmp_path) == frozenset()
    info = '  thunk_info {\n    profile_annotation: "copy.1"\n    thunk_id: 1\n  }\n'
    (tmp_path / "m.thunk_metadata.txt").write_text(f"thunk_metadata {{\n{info}}}\n")
    (tmp_path / "m.thunk_sequence_after_thunk_passes.txt").write_text(SEQUENCE)
    assert bill["buffers"].in_command_buffers(tmp_path) == {"copy.1"}


@pytest.mark.parametrize("kind", ["all-gather", "reduce-scatter", "all-to-all"])
def test_a_collective_that_is_started_and_ended_launches_once(bill, kind):
    text = f"""\
HloModule m, is_scheduled=true

ENTRY %main (x: f32[8,64]) -> f32[8,64] {{
  %x = f32[8,64]{{1,0}} parameter(0)
  %begun = (f32[8,64]{{1,0}}, f32[8,64]{{1,0}}) {kind}-start(%x), replica_groups={{{{0,1}}}}, \
dimensions={{0}}, metadata={{op_name="jit(step)/mlp/x"}}
  ROOT %ended = f32[8,64]{{1,0}} {kind}-done(%begun)
}}
"""
    assert account(bill, text).total.launches == 1
