"""What can be minimised: one declaration per objective, the registry of all of them, and the loss that adds some up.

Declarations are in pairs.py, coupled.py, reference_free.py, lists.py, labels.py and rewards.py; registry.py collects
them. Only loss.py imports torch.
"""
