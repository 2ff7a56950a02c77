"""OLMo-core: the train module, the data loader and callbacks."""
