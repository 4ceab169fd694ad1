"""The simulator: discrete events over the runtime's schedules, with the same trace.

It needs neither torch nor the hardware.
"""

from lightning_hetero.sim.simulation import HasStaging, Simulation, simulate
from lightning_hetero.sim.step_memory import StepMemory

__all__ = ["HasStaging", "Simulation", "StepMemory", "simulate"]
