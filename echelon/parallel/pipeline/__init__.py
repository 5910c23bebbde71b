"""Pipelines: schedules as data, and what reads them: a simulator, drawings and the runtime."""
