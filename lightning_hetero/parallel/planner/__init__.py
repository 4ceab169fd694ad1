"""Plans asymmetric 3D parallelism for clusters whose devices differ.

Source: "Diving into 3D Parallelism with Heterogeneous Spot Instance GPUs: Design and Implications" (AutoHet); which of its symbols
are inferred is said in docs/planners/autohet.md. Equation numbers in this package are that paper's. Imports no torch.
"""

from lightning_hetero.parallel.planner.clusters import PAPER_CLUSTERS, cluster, load_cluster
from lightning_hetero.parallel.planner.search import PLANNERS, plan

__all__ = ["PAPER_CLUSTERS", "PLANNERS", "cluster", "load_cluster", "plan"]
