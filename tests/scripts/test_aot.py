"""What scripts/aot.py reads out of an optimized program; compiling itself needs the CUDA plugin."""

import pytest
from conftest import ROOT

HLO = """\
HloModule jit_whole, is_scheduled=true

%add (a: bf16[], b: bf16[]) -> bf16[] {
  %a = bf16[] parameter(0)
  %b = bf16[] parameter(1)
  ROOT %sum = bf16[] add(%a, %b)
}

%body (state: (s32[], bf16[8,16])) -> (s32[], bf16[8,16]) {
  %state = (s32[], bf16[8,16]{1,0}) parameter(0)
  %x = bf16[8,16]{1,0} get-tuple-element(%state), index=1
  %start = bf16[8,16]{1,0} all-reduce-start(%x), replica_groups={{0,1,2,3}}, to_apply=%add, \
metadata={op_name="jit(whole)/shard_map/while/body/layer_0/mlp/psum"}
  %done = bf16[8,16]{1,0} all-reduce-done(%start)
  %hop = (bf16[2,16]{1,0}, bf16[2,16]{1,0}) collective-permute-start(%x), \
source_target_pairs={{0,1},{1,2},{2,3},{3,0}}
  ROOT %next = (s32[], bf16[8,16]{1,0}) tuple(%i, %done)
}

%condition (state: (s32[], bf16[8,16])) -> pred[] {
  ROOT %more = pred[] parameter(0)
}

ENTRY %main (x: bf16[8,16]) -> f32[8,64] {
  %x = bf16[8,16]{1,0} parameter(0)
  %loop = (s32[], bf16[8,16]{1,0}) while(%init), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"22"}}
  ROOT %logits = f32[8,64]{1,0} all-gather(%y), replica_groups=[2,2]<=[4], dimensions={1}
}
"""


@pytest.fixture
def aot(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import aot

    return aot


def test_collectives_are_counted_by_the_turns_of_their_loops(aot):
    found = {one.kind: one for one in aot.collectives(HLO, devices=4)}
    assert set(found) == {"all-reduce", "collective-permute", "all-gather"}
    reduce, hop, gather = (found[k] for k in ("all-reduce", "collective-permute", "all-gather"))
    assert (reduce.calls, reduce.dtype, reduce.payload, reduce.ranks) == (22, "bf16", 256, 4)
    assert (reduce.sent, reduce.scope) == (2 * 256 * 3 // 4, "layer_0/mlp/psum")
    assert (hop.calls, hop.payload, hop.sent) == (22, 64, 64)
    assert (gather.calls, gather.payload, gather.ranks, gather.sent) == (1, 2048, 2, 1024)
    assert all(one.bounded for one in found.values())


def test_a_loop_without_a_known_number_of_turns_is_said_to_be_one(aot):
    text = HLO.replace('"known_trip_count":{"n":"22"}', "")
    loops = [one for one in aot.collectives(text, devices=4) if one.kind != "all-gather"]
    assert [(one.calls, one.bounded) for one in loops] == [(1, False)] * 2
