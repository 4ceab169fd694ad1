"""The pipeline as data: model → plan → schedule → trace.

Frozen dataclasses with text codecs; standard library only.
"""
