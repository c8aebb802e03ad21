"""Terms beside the policy loss: how far the policy is from a frozen reference."""

from typing import Literal

from torch import Tensor

from megatron_a3po.algorithm.loss import bounded_exp


def kl_to_reference(
    target_logprobs: Tensor, reference_logprobs: Tensor, estimator: Literal["k1", "k3"] = "k3"
) -> Tensor:
    """Estimate of KL(target || reference) per token, [tokens] float32, with gradient.

    k1 = log pi_target - log pi_reference; k3 = rho - 1 - log rho with rho = pi_reference / pi_target, which is never
    negative and varies less (Schulman, "Approximating KL divergence"; DeepSeekMath, arXiv 2402.03300, eq. 4).
    """
    log_rho = reference_logprobs.detach() - target_logprobs
    return -log_rho if estimator == "k1" else bounded_exp(log_rho) - 1 - log_rho
