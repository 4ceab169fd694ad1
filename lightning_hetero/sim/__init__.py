"""The simulator: discrete events over the schedules that the runtime executes, with the same trace. No torch, no hardware."""

from lightning_hetero.sim.memory import Memory
from lightning_hetero.sim.simulate import HasStaging, Simulation, simulate

__all__ = ["HasStaging", "Memory", "Simulation", "simulate"]
