import sys, dataclasses, torch
import qhyer

print(qhyer.__file__)
from qhyer import presets, runs
from qhyer.bench import common
from qhyer.config import replace
from qhyer.data import registry
from qhyer.data.goals import Several
from qhyer.rng import stream_seed
from qhyer.stack import Stack, stacked
from qhyer.update import Update

cpu = torch.device("cpu")
torch.set_num_threads(1)
precision = sys.argv[1]
reg = registry.get("cube-single-play")
eps = common.made_up_episodes(reg, 20, cpu)
for spec in sys.argv[2:]:
    name, *over = spec.split(":")
    config = replace(
        presets.resolve(name, "paper", reg.name)[0], {"batch_size": 64, **dict(o.split("=") for o in over)}
    )
    h = {f.name: (64, 64) for f in dataclasses.fields(config) if "hidden" in f.name}
    if hasattr(config, "latent_dim"):
        h["latent_dim"] = 64
    config = replace(config, h)
    seeds = (0, 1, 5)

    def gen(s):
        return torch.Generator().manual_seed(stream_seed(s, "data"))

    def make(s):
        return runs.build_agent(name, config, eps.spec(), s).train()

    alone = []
    for s in seeds:
        agent = make(s)
        (stage,) = agent.stages()
        u = Update(agent, stage, stage.sampler.build(eps, gen(s)), precision, cpu)
        torch.manual_seed(s)
        lines = []
        for k in range(10):
            u(k)
            lines.append(u.take_metrics())
        alone.append((agent, lines))
    own = [make(s) for s in seeds]
    whole, stage = stacked(own)
    u = Update(whole, stage, stage.sampler.build(eps, Several([gen(s) for s in seeds])), precision, cpu)
    lines = []
    for k in range(10):
        u(k)
        lines.append(u.sums.clone())
        u.sums.zero_()
    Stack(own, u)._hand_out()
    worst = 0
    for i, (agent, ls) in enumerate(alone):
        for k in range(10):
            for j, n in enumerate(u.names):
                a, b = ls[k][n], lines[k][i, j].item()
                e = abs(a - b) / (abs(a) + 1e-3)
                worst = max(worst, e)
    wworst = max(
        float((a - b).norm() / (a.norm() + 1e-6))
        for (ag, _), o in zip(alone, own)
        for a, b in zip(ag.state_dict().values(), o.state_dict().values())
    )
    mworst = max(
        float((x["exp_avg_sq"] - y["exp_avg_sq"]).norm() / (x["exp_avg_sq"].norm() + 1e-12))
        for (ag, _), o in zip(alone, own)
        for x, y in zip(ag.stages()[0].optimizers[0].state.values(), o.stages()[0].optimizers[0].state.values())
    )
    print(spec, "metrics", worst, "weights", wworst, "moments", mworst, flush=True)
