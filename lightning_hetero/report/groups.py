"""The blocks of a plan by placement."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_hetero.ir.plan import BlockPlan, Plan


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Blocks with the same placement.

    Attributes:
        indices: The blocks.
        placed: Their placement, with the first block's name.
    """

    indices: tuple[int, ...]
    placed: BlockPlan

    def names(self, plan: Plan) -> str:
        """The blocks' names: neighbours as first and last, many runs as one with gaps."""
        runs: list[list[int]] = []
        for index in self.indices:
            if runs and runs[-1][-1] == index - 1:
                runs[-1].append(index)
            else:
                runs.append([index])
        texts = [plan.blocks[r[0]].name + (f" … {plan.blocks[r[-1]].name}" if len(r) > 1 else "") for r in runs]
        if len(runs) <= 2:
            return ", ".join(texts)
        return f"{plan.blocks[runs[0][0]].name} … {plan.blocks[runs[-1][-1]].name}, with gaps"


def groups(plan: Plan) -> list[Group]:
    """The blocks of a resolved plan by placement, in the order of their first one."""
    found: dict[tuple[object, ...], list[int]] = {}
    for index, block in enumerate(plan.blocks):
        key = (block.weights, block.state, block.update, block.saved, block.boundary, tuple(sorted(block.operators.items())))
        found.setdefault(key, []).append(index)
    return [Group(indices=tuple(indices), placed=plan.blocks[indices[0]]) for indices in found.values()]
