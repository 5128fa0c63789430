"""The released names of the vision tower and its projector, as `names` has those of the decoder.
All tensors are bfloat16; 4-bit forms are not read.
"""

from collections.abc import Collection

from ..config.vision import VisionConfig
from ..model.vision.tower import CHANNELS
from .names import PROJECTOR, TOWER, Storage, Weight

_BLOCK = f"{TOWER}encoder.blocks."
_BF16 = Storage("bfloat16", ("BF16",))
_LINEARS = (("proj.0", "proj.2"), ("linear_1", "linear_2"))  # released, and of some re-exports


def holds_tower(names: Collection[str]) -> bool:
    """Whether tensors with these names hold a tower: at least one of its blocks."""
    return any(name.startswith(_BLOCK) for name in names)


def vision_table(config: VisionConfig, names: Collection[str] = ()) -> list[Weight]:
    """Every weight of the tower and the projector; of the two spellings of the projector's weights
    the one that is among the `names` of a checkpoint.
    """
    return [*_tower(config), *_projector(config, names)]


def _tower(config: VisionConfig) -> list[Weight]:
    C, p, end = config.width, config.patch, "encoder.final_layernorm.weight"
    blocks = [weight for i in range(config.blocks) for weight in _block(config, i)]
    return [
        _weight("tower.w_patch", f"{TOWER}patch_embed.proj.weight", C, CHANNELS, p, p),
        _weight(
            "tower.table",
            f"{TOWER}patch_embed.pos_emb.weight",
            config.table_rows,
            config.table_columns,
            C,
        ),
        *blocks,
        _weight("tower.norm", f"{TOWER}{end}", C),
    ]


def _block(config: VisionConfig, i: int) -> list[Weight]:
    C, X, F = config.width, config.qkv_width, config.ffn
    name, source = f"tower.blocks.{i}.", f"{_BLOCK}{i}."
    return [
        _weight(f"{name}attention_norm", f"{source}norm0.weight", C),
        _weight(f"{name}w_qkv", f"{source}wqkv.weight", 3 * X, C),
        _weight(f"{name}w_o", f"{source}wo.weight", C, X),
        _weight(f"{name}mlp_norm", f"{source}norm1.weight", C),
        _weight(f"{name}w_in", f"{source}mlp.fc0.weight", F, C),
        _weight(f"{name}w_out", f"{source}mlp.fc1.weight", C, F),
    ]


def _projector(config: VisionConfig, names: Collection[str]) -> list[Weight]:
    M, D = config.merged_width, config.hidden
    spelled = [pair for pair in _LINEARS if f"{PROJECTOR}{pair[0]}.weight" in names]
    first, second = (spelled or _LINEARS)[0]
    return [
        _weight("projector.w_in", f"{PROJECTOR}{first}.weight", M, M),
        _weight("projector.w_out", f"{PROJECTOR}{second}.weight", D, M),
        _weight("projector.norm", f"{PROJECTOR}post_norm.weight", D),
    ]


def _weight(name: str, source: str, *shape: int) -> Weight:
    return Weight(name, source, shape, _BF16)
