"""Mixed precision: autocast in both types and the gradient scaler."""

import torch
from bits import state_bits

for dtype in (torch.float16, torch.bfloat16):
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 128), torch.nn.LayerNorm(128), torch.nn.GELU(), torch.nn.Linear(128, 8)
    )
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype == torch.float16)
    for _ in range(4):
        with torch.autocast("cuda", dtype=dtype):
            out = model(torch.randn(32, 64, device="cuda"))
            loss = out.float().square().mean()
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        scaler.step(optimizer)
        scaler.update()
        print(out.dtype, loss.item().hex(), norm.item().hex(), scaler.get_scale())
    print(state_bits(model))
