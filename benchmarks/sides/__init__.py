"""Contenders of the benchmarks that compare outcore with others, and what runs them in turn."""
