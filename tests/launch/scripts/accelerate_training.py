"""Hugging Face Accelerate, on CPUs: prints the backend it chose and the parameters it trained."""

import json
import sys
import time

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.utils import InitProcessGroupKwargs
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

handlers = [InitProcessGroupKwargs(backend=sys.argv[1])] if len(sys.argv) > 1 else []
accelerator = Accelerator(cpu=True, kwargs_handlers=handlers)
kept = dist.group.WORLD  # Gloo aborts the process when the last reference to a group goes inside a callback of its own
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(8, 16), nn.Tanh(), nn.Linear(16, 1))
data = TensorDataset(torch.randn(64, 8), torch.randn(64, 1))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(data, batch_size=4))
for x, y in loader:
    loss = nn.functional.mse_loss(model(x), y)
    accelerator.backward(loss)
    optimizer.step()
    optimizer.zero_grad()
losses = accelerator.gather(loss.detach().reshape(1))
if accelerator.is_main_process:
    parameters = [p.flatten().tolist() for p in accelerator.unwrap_model(model).parameters()]
    print("RESULT", json.dumps({"backend": dist.get_backend(), "losses": losses.tolist(), "parameters": parameters}))
accelerator.end_training()
if handlers:
    time.sleep(0.2)  # PyTorch's own group aborts if its threads still hold tensors at exit (pytorch#179291)
