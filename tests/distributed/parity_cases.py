"""Which models in which layouts the actor is compared in. `make test` runs one case of each kind,
`make test-all` and `make parity` run all."""

from typing import Any

from tests.distributed.parity import Case

_DENSE_LAYOUTS: list[dict[str, Any]] = [
    {},
    {"tensor": 2},
    {"tensor": 4},
    {"pipeline": 2},
    {"pipeline": 4},
    {"pipeline": 2, "virtual_pipeline": 2},
    {"context": 2},
    {"context": 4},
    {"tensor": 2, "pipeline": 2},
    {"tensor": 2, "pipeline": 2, "virtual_pipeline": 2},
    {"tensor": 2, "context": 2},
    {"pipeline": 2, "context": 2},
]
_EXPERT_LAYOUTS: list[dict[str, Any]] = [
    {},
    {"expert": 2},
    {"expert": 4},
    {"tensor": 2, "expert": 2},
    {"tensor": 2, "expert": 4},
    {"pipeline": 2, "expert": 2},
    {"context": 2, "expert": 2},
    {"pipeline": 2, "virtual_pipeline": 2, "expert": 2},
]
_TP2_PP2 = {"tensor": 2, "pipeline": 2}
_TP2_CP2 = {"tensor": 2, "context": 2}

DENSE = [Case(family=family, parallel=layout) for family in ("qwen3_tied", "qwen3") for layout in _DENSE_LAYOUTS]
EXPERTS = [Case(family="qwen3_moe", parallel=layout) for layout in _EXPERT_LAYOUTS]
FAMILIES = (
    [
        Case(family=family, parallel=layout)
        for family in ("qwen2", "llama3")
        for layout in ({}, _TP2_PP2, _TP2_CP2, {"pipeline": 2, "virtual_pipeline": 2})
    ]
    + [Case(family="qwen3_yarn", parallel=_TP2_PP2)]
    # More tensor-parallel ranks than key-value heads.
    + [Case(family="qwen3_mqa", parallel=layout) for layout in (_TP2_PP2, _TP2_CP2, {"tensor": 4})]
    + [Case(family=family, parallel={"tensor": 4}) for family in ("qwen2", "llama3", "gpt_oss")]
    + [
        Case(family=family, parallel=layout)
        for family in ("glm4_moe", "deepseek_v3", "gpt_oss")
        for layout in ({"expert": 2}, {"tensor": 2, "expert": 2}, {"pipeline": 2, "expert": 2}, _TP2_PP2)
    ]
)
_ENTROPY_AND_KL = {"entropy_coefficient": 0.01, "kl_coefficient": 0.1}
OPTIONS = [
    Case(parallel=_TP2_PP2, settings={"actor": {"activation_recompute": "full"}}),
    Case(family="deepseek_v3", parallel={"pipeline": 2, "expert": 2, "last_stage_layers": 1}),
    Case(parallel={"tensor": 2}, settings={"actor": {"minibatches": 2}}),
    Case(parallel={"tensor": 2}, settings={"actor": {"minibatches": 4}, "proximal": "recompute"}),
    Case(parallel={"pipeline": 2}, settings={"actor": {"minibatches": 4, "output_layer": "fused"}}),
    Case(parallel=_TP2_CP2, settings={"algorithm": {"ratio_level": "sequence"}}),
    Case(
        parallel=_TP2_PP2,
        settings={"algorithm": _ENTROPY_AND_KL, "actor": {"output_layer": "fused"}, "proximal": "recompute"},
    ),
    Case(parallel=_TP2_PP2, settings={"algorithm": {"compare_with_recompute": True}}),
    Case(parallel=_TP2_CP2, settings={"rollout": {"temperature": 0.7}}),
    Case(
        parallel={"tensor": 2},
        settings={"optimizer": {"schedule": "linear", "warmup_steps": 3}, "actor": {"minibatches": 2}},
    ),
    Case(parallel={}, settings={"optimizer": {"weight_decay": 0.1}}),
]
"""One case of each option"""
MORE_OPTIONS = [
    Case(parallel=_TP2_PP2, settings={"actor": {"activation_recompute": "selective"}}),
    Case(parallel={**_TP2_PP2, "overlap": False}),
    Case(parallel={"tensor": 2, "overlap": False}, settings={"actor": {"minibatches": 2}}),
    Case(parallel={"pipeline": 2, "virtual_pipeline": 2}, settings={"actor": {"minibatches": 2}}),
    Case(family="qwen3_moe", parallel={"tensor": 2, "expert": 2}, settings={"actor": {"activation_recompute": "full"}}),
    Case(family="qwen3_moe", parallel={"expert": 2}, settings={"actor": {"minibatches": 2}}),
    Case(family="qwen3", parallel={}, settings={"actor": {"minibatches": 4, "output_layer": "fused"}}),
    Case(parallel={"context": 4}, settings={"algorithm": {"ratio_level": "sequence"}}),
    Case(parallel=_TP2_CP2, settings={"algorithm": _ENTROPY_AND_KL, "actor": {"output_layer": "fused"}}),
    Case(parallel=_TP2_PP2, settings={"rollout": {"temperature": 0.7}, "actor": {"output_layer": "fused"}}),
]

ALL = DENSE + EXPERTS + FAMILIES + OPTIONS + MORE_OPTIONS
REPRESENTATIVE = [
    Case(parallel={"tensor": 2, "pipeline": 2}),
    Case(parallel={"pipeline": 2, "virtual_pipeline": 2}),
    Case(parallel={"pipeline": 2, "context": 2}),
    Case(family="qwen3", parallel={"tensor": 4}),
    Case(family="qwen3_mqa", parallel={"tensor": 4}),
    Case(family="qwen2", parallel=_TP2_CP2),
    Case(family="llama3", parallel=_TP2_PP2),
    Case(family="qwen3_moe", parallel={"tensor": 2, "expert": 2}),
    Case(family="qwen3_moe", parallel={"context": 2, "expert": 2}),
    Case(family="glm4_moe", parallel={"pipeline": 2, "expert": 2}),
    Case(family="deepseek_v3", parallel={"tensor": 2, "expert": 2}),
    Case(family="gpt_oss", parallel={"tensor": 2, "expert": 2}),
    *OPTIONS,
]
