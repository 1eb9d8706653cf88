"""Objectives of a policy, which `[algorithm] objective` names: surrogates of the policy gradient."""
