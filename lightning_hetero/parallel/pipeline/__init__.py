"""Asymmetric pipelines at run time: groups of different depth train one model together.

[Note: Segments]
A *group* is one pipeline that holds the whole model; a *stage* is one rank of it, or several that
share every layer (tensor parallelism). Cutting the model at every stage boundary of every group
gives *segments*. Each has one owner per group, so its owners form a rectangular mesh even though
the whole plan does not. Gradients of a segment are summed over its owners, segments in the order of
the model on every rank: a rank's segments are consecutive, so no two ranks meet two of them in
opposite order.

[Note: Scaling]
Means over micro-batches cannot be averaged if groups take different numbers of them. So losses are
summed, and gradients with them; both are divided once, by the items (tokens, samples) of the whole
step.

[Note: Replicas]
All owners of a layer have the same weights, gradients and optimizer state, bit for bit: they start
with the same weights, get the same sum of gradients, and clip by a norm that is added up in the
same order everywhere.
"""
