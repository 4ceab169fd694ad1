"""The words of the commands' tables, as ``--help`` explains them."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence

_COLUMNS = 76  # beside the indentation of help texts
_LEFT = 18  # columns for a word; a longer one gets a line of its own

_STEP = {
    "iteration, step": "seconds of one optimizer step in steady state, simulated",
    "tokens/s": "tokens of a step by its seconds",
    "forward, backward": "its two phases; backward includes updates that the next step waits for",
    "bound by": "the lane that is busy longest in a phase",
    "device, host, disk": "tiers: the accelerator's memory, the machine's memory, the SSD",
    "device memory, host memory, disk space": "what a step takes of each tier at its peak",
}
_MODEL = {
    "model": "parameters, blocks (units of placement, usually one layer each), bits of weights in compute",
    "machine": "its memory and the reading rate of its disk",
    "head": "the logits of a language model, if they take more memory than any layer",
    "disk wear": "what steps write to the SSD, and how long it lasts by its rating",
}
_PLAN = {
    "objective": "the step by the planner's own formula",
    "weights, state": "where weights and optimizer state live between uses: numbers of blocks",
    "update": "which processor runs the optimizer: device or cpu",
    "kept, recomputed": "bytes of activations that stay, or are computed again in backward",
    "swapped host, swapped disk": "bytes of activations that wait on the host or the disk for backward",
    "prefetch depth": "blocks whose weights are fetched ahead of their use",
    "gradient depth": "blocks whose gradients may wait for their update",
    "micro batches": "parts into which a step's batch is cut",
    "lower bound, gap": "no plan is faster than the bound; how far the plan is above it",
    "start": "the planner whose plan it is, or from which the search began",
    "evaluations": "simulations of the search",
    "ended": "why the search ended: at the bound, at a limit (time), or with nothing left to try",
    "activations": "what happens to what forward keeps for backward: keep, recompute, swap_host, swap_disk",
    "inputs": "the same of blocks' inputs, from which they are recomputed",
    "update order": "of CPU updates: overlapped with backward, naive (one after the other), after_backward",
    "priority": "whether the next forward begins before all updates are done",
    "other rows": "variables of the planner's paper; docs/planners has a page on each",
    "paper's optimum": "what the equations of the planner's paper would choose, if that does not fit",
    "planned in": "seconds of planning",
}
_ALL = {"x best": "a step relative to the fastest plan's", "no plan": "it does not fit; the reason is below the table"}
_LANES = {
    "lane": "an in-order queue on one resource: compute, cpu (updates), disk_read, disk_write, h2d and d2h "
    "(copies to and from the device), net (what several devices exchange)",
    "busy": "the share of the step in which a lane works",
    "F, B": "forward and backward of a block",
    "FETCH, UPLOAD": "weights or state from disk to host; weights from host to device",
    "GRAD, UPDATE": "gradients from device to host; the optimizer's update of a block",
    "STORE, MIRROR": "updated data to disk; data that also lives in memory to disk, in kept steps",
    "SWAP_OUT, SWAP_IN": "activations or state to a lower tier, and back",
    "before, for": "what compute could not begin, and which op it waited for",
    "meanwhile": "what happened during the wait",
    "peak, of, used": "the most memory of a step, the tier's capacity, and their ratio",
}
_EXPLAIN = {
    "no backward": "a validation batch, and what each generated token has to bring",
    "activations": "keep, recompute, to host, to disk: shares of their bytes",
    "mirrors": "bytes in memory that a kept step writes to disk",
    "slots": "copies of frozen weights in the store; 0: read in place from their files",
    "change": "one block placed in another way; or another machine or batch",
    "Binding": "the resource that shortens the step most, were it a tenth faster",
    "Full": "tiers that are at least 95 % full",
    "this one, another": "whether this plan is the best for the changed case, or a new one",
}
_CLUSTER = {
    "played through": "the step of the chosen pipelines, simulated micro-batch by micro-batch",
    "synchronisation": "averaging gradients over the pipelines",
    "utilisation": "the share of the cluster's FLOP/s that is used",
    "tensor parallelism": "devices that compute one layer together",
    "groups": "pipelines of the same kind; batches, takes: their micro-batches of a step, and the seconds of all",
    "stage, layers": "one device or group of a pipeline, and how many layers it holds",
    "each, busy": "seconds of a micro-batch on the stage; the share of the step in which the stage computes",
    "node": "the machine that a device is in, by its name in the cluster file",
    "slowest stage, it computes": "the stage that sets the pace, and its seconds of a step",
    "pipeline fills, drains": "when stages have no micro-batch yet, or none any more",
    "price": "of a step, if the cluster file has prices",
    "tensor, against this": "runner-ups: degree of tensor parallelism, and their step relative to this one",
}
_MACHINE = {
    "link h2d, d2h": "copies from host to device and back",
    "disk duplex": "whether reads and writes at once slow each other",
    "update, downcast": "Adam and conversions to 16 bits, elements per second",
    "contention": "how many times longer one kind of work takes beside another",
    "source": "how and when a figure was measured, and how far repetitions spread",
}
_DOCTOR = {
    "control group limit": "memory that this process's group may use",
    "usable": "memory that training may use now",
    "lockable": "memory that may be page-locked for faster copies",
    "huge pages": "transparent ones are used where the system allows (madvise or always)",
    "in memory": "whether the path is on tmpfs, which is no tier",
    "rotational": "whether the disk has moving heads",
    "direct io": "whether the file system reads and writes past its cache",
}
_STORE = {
    "kind": "store, safetensors, checkpoint or plan",
    "uuid": "the store's own number, which links of it share",
    "temporary": "removed as its run ends",
    "global step": "Lightning's number of optimizer steps; none if no step ended with the commit",
    "step": "the number of the commit",
    "state files, notes": "the loop's state beside the weights, and what is said of the last step",
    "entries": "the top-level keys of a checkpoint",
    "number, in all": "tensors of one name pattern and dtype, and their bytes together",
    "in": "the file or the entry that holds them",
    "checked, faults": "what was compared, and what differs from what was written",
    "state arrays": "of optimizer state, such as Adam's two",
    "digests": "whether contents have checksums of their own, which verify compares",
    "stamps": "the numbers of step and block at every chunk",
}

WORDS: Mapping[str, Sequence[Mapping[str, str]]] = {
    "plan": (_MODEL, _STEP, _PLAN, _ALL),
    "explain": (_MODEL, _STEP, _PLAN, _ALL, _LANES, _EXPLAIN, _CLUSTER),
    "simulate": (_MODEL, _STEP, _LANES),
    "report": (_MODEL, _STEP, _LANES, _EXPLAIN),
    "plan-cluster": (_MODEL, _STEP, _CLUSTER),
    "profile": (_MACHINE,),
    "doctor": (_DOCTOR,),
    "inspect": (_STORE,),
    "verify": (_STORE,),
}


def epilog(command: str) -> str:
    """The words of a command's tables, below its options; a blank line before each keeps lines."""
    lines = ["Words in the tables:"]
    for words in WORDS[command]:
        for word, meaning in words.items():
            first, *rest = textwrap.wrap(meaning, _COLUMNS - _LEFT)
            if len(word) < _LEFT - 3:
                lines.append(f"  {word.ljust(_LEFT - 2)}{first}")
            else:
                lines += [f"  {word}", " " * _LEFT + first]
            lines += [" " * _LEFT + line for line in rest]
    return "\b\n" + "\n".join(lines)
