//! Tests of the file of deployments.

use super::*;

const PAIR: &str = "
deployments:
  - name: llama
    namespace: models
    gateways: [http://gateways:9000/metrics]
    scale:
      prefill: rolebasedgroupscalingadapters.v1alpha2.workloads.x-k8s.io/llama-prefill
      decode: deployments.v1.apps/llama-decode
    decode_kv_tokens: 400000
    settings:
      targets: { ttft_s: 1.5, tpot_s: 0.04 }
      prefill: { min: 2, max: 8, first_tokens_per_s: 9000 }
      interval_s: 10
";

fn problem(text: &str) -> String {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("deployments.yaml");
    std::fs::write(&path, text).unwrap();
    let error = read(&path).unwrap_err().to_string();
    error.strip_prefix(&format!("--deployments {}: ", path.display())).unwrap().to_owned()
}

#[test]
fn a_deployment_has_gateways_targets_and_settings() {
    let [deployment]: [DeploymentSpec; 1] = parse(PAIR).unwrap().try_into().unwrap();
    assert_eq!(deployment.key.to_string(), "models/llama");
    assert_eq!(deployment.gateways[0].as_str(), "http://gateways:9000/metrics");
    let roles: Vec<_> =
        deployment.scale.roles().iter().map(|(role, target)| (*role, target.to_string())).collect();
    assert_eq!(roles[1], (ScaledRole::Decode, "deployments.v1.apps/llama-decode".to_owned()));
    assert_eq!(deployment.decode_kv_tokens, Some(400_000));
    let settings = &deployment.settings;
    assert_eq!((settings.prefill.min, settings.decode.min), (2, 1));
    assert_eq!(
        (settings.targets.ttft_s, settings.targets.share),
        (1.5, 0.95),
        "members left out have defaults"
    );
}

#[test]
fn errors_name_the_deployment_and_the_fix() {
    let cases = [
        ("interval_s: 10", "interval: 10", "deployment models/llama: unknown field `interval`"),
        (
            "name: llama\n",
            "name: Llama\n",
            "deployment models/Llama: name \"Llama\": must be a name of Kubernetes",
        ),
        ("name: llama\n    ", "", "deployment number 1: missing field `name`"),
        ("[http://gateways:9000/metrics]", "[]", "gateways: give 1 to 64 URLs"),
        ("http://gateways:9000/metrics", "gateways:9000", "neither http:// nor https://"),
        (
            "deployments.v1.apps/llama-decode",
            "llama-decode",
            "scale: \"llama-decode\": expected RESOURCE.VERSION.GROUP",
        ),
        (
            "decode: deployments.v1.apps/llama-decode",
            "",
            "scale: give `prefill` and `decode`, or only `plain`",
        ),
        ("decode_kv_tokens: 400000", "decode_kv_tokens: 0", "leave it out if it is not known"),
        ("min: 2, max: 8", "min: 9, max: 8", "settings: prefill: min 9 exceeds max 8"),
        ("interval_s: 10", "interval_s: 600", "settings: interval_s 600: must be from 1 to 60"),
        ("interval_s: 10", "flip: { flip_s: 5 }", "settings: flip: no engine changes its role in place"),
    ];
    for (valid, invalid, message) in cases {
        let problem = problem(&PAIR.replace(valid, invalid));
        assert!(problem.contains(message), "{invalid}: {problem}");
    }
    assert!(problem("deployments: 3").contains("deployments"));
    assert!(problem("other: []").contains("other"));
}

#[test]
fn two_deployments_share_neither_gateways_nor_targets() {
    let second = |name: &str, gateway: &str, target: &str| {
        let text = format!(
            "{PAIR}
  - name: {name}
    namespace: models
    gateways: [{gateway}]
    scale: {{ plain: {target} }}
"
        );
        problem(&text)
    };
    let fine = "http://others:9000/metrics";
    assert!(
        second("llama", fine, "deployments.v1.apps/a")
            .contains("another deployment has this namespace and name")
    );
    let shared = second("b", "http://gateways:9000/metrics", "deployments.v1.apps/a");
    assert!(shared.contains("belongs to models/llama as well"), "{shared}");
    let shared = second("b", fine, "deployments.v1.apps/llama-decode");
    assert!(shared.contains("is scaled by models/llama as well"), "{shared}");
    let twice = PAIR.replace(
        "rolebasedgroupscalingadapters.v1alpha2.workloads.x-k8s.io/llama-prefill",
        "deployments.v1.apps/llama-decode",
    );
    assert!(problem(&twice).contains("is scaled by models/llama as well"));
}

#[test]
fn plain_engines_have_the_bounds_of_both_roles() {
    let plain = |settings: &str| {
        format!(
            "deployments: [{{ name: a, namespace: b, gateways: [http://c:1/metrics], scale: {{ plain: deployments.v1.apps/d }}, settings: {settings} }}]"
        )
    };
    let deployments =
        parse(&plain("{ prefill: { max: 4 }, decode: { max: 4, first_tokens_per_s: 900 } }")).unwrap();
    assert_eq!(deployments[0].scale.engine_roles(), (ScaledRole::Plain, ScaledRole::Plain));
    assert!(problem(&plain("{ prefill: { max: 4 } }")).contains("min, max and night_min must be the same"));
    assert!(problem(&plain("{ gpu_budget: 8 }")).contains("limit them by `max` instead"));
}
