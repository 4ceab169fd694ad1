"""Plans asymmetric 3D parallelism for clusters of different devices.

Source: "Diving into 3D Parallelism with Heterogeneous Spot Instance GPUs: Design and Implications"
(AutoHet). docs/planners/autohet.md says which of its symbols are inferred. Equation numbers in this
package are that paper's. Imports no torch.
"""

from lightning_hetero.parallel.planner.known_clusters import PAPER_CLUSTERS, cluster, load_cluster
from lightning_hetero.parallel.planner.search import PLANNERS, plan

__all__ = ["PAPER_CLUSTERS", "PLANNERS", "cluster", "load_cluster", "plan"]
