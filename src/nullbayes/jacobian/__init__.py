"""From a network and a loader to rows: the only room that knows ``torch.func``."""
