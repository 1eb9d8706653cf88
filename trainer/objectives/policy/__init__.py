"""Objectives of a policy, named by `[algorithm] objective`: surrogates of the policy gradient."""
