"""What can be minimised: one declaration per objective, the registry of all of them, and the loss made of some.

A declaration is in pairs.py, coupled.py, reference_free.py or lists.py. registry.py collects them. Only loss.py imports
torch.
"""
