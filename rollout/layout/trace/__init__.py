"""Tracing: watches a model's own loading of tensors without data, and learns where each checkpoint element goes."""
