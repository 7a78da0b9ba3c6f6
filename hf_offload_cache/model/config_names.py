"""The name of the attention implementation in a model's configs: ours while the seams are on, then what it was."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .inner_model import is_model
from .registered_attention import PREFIX, register, replaceable

if TYPE_CHECKING:
    from transformers import PreTrainedModel

Renamed = list[tuple[Any, str]]
"""Configs that carry our name, with the names that they had."""


class AttentionName(str):
    """Our name for an implementation; equal to the implementation's own as well, since some models compare.

    Its hash is that of our name: look-ups in transformers' tables find ours, and never the other.
    """

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, other) or self.removeprefix(PREFIX) == other

    def __ne__(self, other: object) -> bool:
        return not (str.__eq__(self, other) or self.removeprefix(PREFIX) == other)

    def __hash__(self) -> int:  # torch.compile traces this one, and not str's own
        return hash(str(self))


def rename_attention(model: PreTrainedModel, renamed: Renamed, others: Renamed) -> None:
    """Put our name on the configs of `model` and note each in `renamed`, as it is done.

    Nothing where a part of the model cannot set its implementation. `others` carry our name for other models: of a
    config that is shared, the first name is what it had.
    """
    if not all(submodel._can_set_attn_implementation() for submodel in _submodels(model)):
        return
    for config in configs_of(model):
        name = config._attn_implementation_internal
        base = (name or "eager").removeprefix(PREFIX)
        if replaceable(base):
            register(base)
            shared = [kept for kept in others if kept[0] is config]
            renamed.append(shared[0] if shared else (config, name))
            config._attn_implementation_internal = AttentionName(PREFIX + base)


def restore_attention(renamed: Renamed, others: Renamed) -> None:
    """Give the configs their names back, but for those that `others` hold and those that the user has set since."""
    held = {id(config) for config, _ in others}
    for config, name in renamed:
        if id(config) not in held and carries_ours(config):
            config._attn_implementation_internal = name


def strip_attention(model: PreTrainedModel, others: Renamed) -> None:
    """Take our name off the configs of a copy: nobody would restore it."""
    held = {id(config) for config, _ in others}
    for config in configs_of(model):
        if carries_ours(config) and id(config) not in held:
            config._attn_implementation_internal = config._attn_implementation_internal.removeprefix(PREFIX)


def carries_ours(config: Any) -> bool:
    """Whether `config` names our attention."""
    return (config._attn_implementation_internal or "").startswith(PREFIX)


def configs_of(model: PreTrainedModel) -> list[Any]:
    """Every distinct config object that a module of `model` may read its implementation from."""
    found: dict[int, Any] = {}

    def visit(config: Any) -> None:
        if config is None or id(config) in found or not hasattr(config, "_attn_implementation_internal"):
            return
        found[id(config)] = config
        for name in getattr(config, "sub_configs", {}):
            visit(getattr(config, name, None))

    visit(model.config)
    for submodel in _submodels(model):
        visit(submodel.config)
    return list(found.values())


def _submodels(model: PreTrainedModel) -> list[PreTrainedModel]:
    return [module for module in model.modules() if is_model(module)]
