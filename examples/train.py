import sys, torch, hookbus
from builtin_plugins import Loop
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

torch.manual_seed(0)
x = torch.linspace(-1, 1, 4096).view(512, 8)
loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x), 16, shuffle=True)
model = torch.nn.Sequential(torch.nn.Linear(8, 64), torch.nn.Dropout(0.1), torch.nn.Linear(64, 1))
ema = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.99))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=80)
scaler = torch.amp.GradScaler(enabled=torch.cuda.is_available())
bus, loop = hookbus.HookBus(), Loop()
bus.attach(model=model, ema=ema, optimizer=optimizer, scheduler=scheduler)
bus.attach(scaler=scaler, data=loader, loop=loop)
bus.resume(sys.argv[1])
for epoch in loop.epochs(10):
    for (inputs,) in loop.batches(loader):
        with torch.autocast("cuda", enabled=torch.cuda.is_available()):
            loss = (model(inputs) - inputs.sum(1, keepdim=True).sin()).square().mean() / 4
        scaler.scale(loss).backward()
        if loop.batch % 4 == 0:  # accumulate
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            optimizer.zero_grad()
            ema.update_parameters(model)
            if loop.every(20):
                bus.save()
bus.close()
