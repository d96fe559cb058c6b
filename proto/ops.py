import sys, torch, collections
from torch.utils._python_dispatch import TorchDispatchMode
from qhyer import presets, runs
from qhyer.bench import common
from qhyer.data import registry
from qhyer.data.goals import Several
from qhyer.stack import stacked
from qhyer.update import Update


class Log(TorchDispatchMode):
    def __torch_dispatch__(self, f, types, args=(), kwargs=None):
        n = str(f)
        shapes = [tuple(a.shape) for a in args if isinstance(a, torch.Tensor)]
        VIEW = any(
            k in n
            for k in (
                "view",
                "expand",
                "transpose",
                "permute",
                "unsqueeze",
                "squeeze",
                "slice",
                "select",
                "detach",
                "unbind",
                "split",
                "alias",
                "as_strided",
                "aten.t.",
                "diagonal.",
                "is_same",
                "_local_scalar",
            )
        )
        if not VIEW:
            L.append((n, shapes))
        return f(*args, **(kwargs or {}))


name, S = sys.argv[1], int(sys.argv[2])
cpu = torch.device("cpu")
reg = registry.get("cube-single-play")
eps = common.made_up_episodes(reg, 5, cpu)
config = presets.resolve(name, "paper", reg.name)[0]
make = lambda s: runs.build_agent(name, config, eps.spec(), s).train()
gen = lambda s: torch.Generator().manual_seed(s)
if S:
    whole, stage = stacked([make(s) for s in range(S)])
    u = Update(whole, stage, stage.sampler.build(eps, Several([gen(s) for s in range(S)])), "fp32", cpu)
else:
    a = make(0)
    (stage,) = a.stages()
    u = Update(a, stage, stage.sampler.build(eps, gen(0)), "fp32", cpu)
u(0)
L = []
with Log():
    u(1)
for n, s in L if len(sys.argv) > 3 else []:
    print(n, s)
print(name, S, len(L), collections.Counter(n for n, _ in L).most_common(12))
