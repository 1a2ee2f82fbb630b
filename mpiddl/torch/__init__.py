"""PyTorch on mpiddl. Importing this package registers the `torch.distributed` backend "mpiddl"; it starts no MPI."""

from mpiddl.torch.process_group_register import autoload

autoload()
