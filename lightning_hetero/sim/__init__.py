"""The simulator: discrete events over the schedules that the runtime executes, with the same trace. No torch, no hardware."""

from lightning_hetero.sim.simulate import HasStaging, Simulation, simulate
from lightning_hetero.sim.step_memory import StepMemory

__all__ = ["HasStaging", "Simulation", "StepMemory", "simulate"]
