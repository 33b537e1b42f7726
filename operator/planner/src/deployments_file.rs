//! The file of deployments: what is scaled, by which metrics, and with which settings.

use std::collections::BTreeMap;
use std::fmt;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};

use moongate_capacity::{InvalidSettings, PlannerSettings, RoleSettings};
use serde::Deserialize;
use serde_json::Value;
use url::Url;

use crate::scale_target::{InvalidScaleTarget, ScaleTarget};

/// Largest file in bytes.
const MAX_FILE_BYTES: u64 = 4 << 20;
/// Most deployments of a file.
const MAX_DEPLOYMENTS: usize = 1000;
/// Most gateway URLs of a deployment.
const MAX_GATEWAY_URLS: usize = 64;
/// Accepted intervals in seconds. The capacity planner is made for 5 to 10.
const INTERVALS: std::ops::RangeInclusive<f64> = 1.0..=60.0;

/// Namespace and name of a deployment.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct DeploymentKey {
    pub namespace: String,
    pub name: String,
}

/// One deployment: engines that serve one model behind their own gateways.
#[derive(Debug, Clone, PartialEq)]
pub struct DeploymentSpec {
    pub key: DeploymentKey,
    /// URLs of the gateways' metrics.
    pub gateways: Vec<Url>,
    pub scale: ScaleTargets,
    /// Tokens in the KV cache of one decode replica; without it, the KV cache does not limit decisions.
    pub decode_kv_tokens: Option<u64>,
    pub settings: PlannerSettings,
}

/// What is scaled.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ScaleTargets {
    /// Separate engines for prefill and decode.
    Pair { prefill: ScaleTarget, decode: ScaleTarget },
    /// Engines that do both.
    Plain { plain: ScaleTarget },
}

/// Engines of one role that are scaled together. The names are those of the gateways' label `role`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum ScaledRole {
    Prefill,
    Decode,
    Plain,
}

/// Why the file cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("--deployments {}: {problem}", path.display())]
pub struct DeploymentsFileError {
    path: PathBuf,
    problem: DeploymentsFileProblem,
}

#[derive(Debug, thiserror::Error)]
enum DeploymentsFileProblem {
    #[error(transparent)]
    Read(#[from] std::io::Error),
    #[error("it has more than {MAX_FILE_BYTES} bytes")]
    TooLarge,
    #[error("{0}")]
    Syntax(String),
    #[error("it has {0} deployments; at most {MAX_DEPLOYMENTS} are supported by one planner")]
    TooMany(usize),
    #[error("deployment {deployment}: {problem}")]
    Deployment { deployment: String, problem: Box<InvalidDeployment> },
}

/// Why one deployment is not accepted.
#[derive(Debug, thiserror::Error)]
enum InvalidDeployment {
    #[error("{0}")]
    Member(serde_json::Error),
    #[error(
        "{member} {value:?}: must be a name of Kubernetes: lower-case letters, digits and `-`, at most 63"
    )]
    Name { member: &'static str, value: String },
    #[error("another deployment has this namespace and name; rename one")]
    Duplicate,
    #[error("gateways: give 1 to {MAX_GATEWAY_URLS} URLs of metrics, such as http://gateways:9000/metrics")]
    GatewayCount,
    #[error("gateways: {url:?} is no URL of metrics ({problem}); write it as http://gateways:9000/metrics")]
    Gateway { url: String, problem: String },
    #[error(
        "gateways: {url} belongs to {other} as well; metrics have no label for the model, so each deployment needs its own gateways"
    )]
    SharedGateway { url: Url, other: String },
    #[error("scale: {0}")]
    Target(#[from] InvalidScaleTarget),
    #[error("scale: give `prefill` and `decode`, or only `plain`")]
    Roles,
    #[error("scale: {target} is scaled by {other} as well; each target can have one planner only")]
    SharedTarget { target: ScaleTarget, other: String },
    #[error("decode_kv_tokens must be at least 1; leave it out if it is not known")]
    NoKvTokens,
    #[error("settings: {0}")]
    Settings(#[from] InvalidSettings),
    #[error("settings: interval_s {0}: must be from 1 to 60")]
    Interval(f64),
    #[error("settings: flip: no engine changes its role in place on Kubernetes; remove it")]
    Flip,
    #[error("settings: plain engines are both roles: {0} must be the same in `prefill` and `decode`")]
    PlainBounds(&'static str),
    #[error("settings: gpu_budget counts plain engines twice; limit them by `max` instead")]
    PlainBudget,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct FileContent {
    deployments: Vec<Value>,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct DeploymentContent {
    name: String,
    namespace: String,
    gateways: Vec<String>,
    scale: ScaleContent,
    decode_kv_tokens: Option<u64>,
    #[serde(default)]
    settings: PlannerSettings,
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct ScaleContent {
    prefill: Option<String>,
    decode: Option<String>,
    plain: Option<String>,
}

/// Reads and checks the file. Deployments are in the order of the file.
///
/// # Errors
/// [`DeploymentsFileError`] names the file, the deployment and the fix.
pub fn read(path: &Path) -> Result<Vec<DeploymentSpec>, DeploymentsFileError> {
    read_text(path)
        .and_then(|text| parse(&text))
        .map_err(|problem| DeploymentsFileError { path: path.to_owned(), problem })
}

fn read_text(path: &Path) -> Result<String, DeploymentsFileProblem> {
    let mut text = String::new();
    let length = File::open(path)?.take(MAX_FILE_BYTES + 1).read_to_string(&mut text)?;
    if length as u64 > MAX_FILE_BYTES { Err(DeploymentsFileProblem::TooLarge) } else { Ok(text) }
}

fn parse(text: &str) -> Result<Vec<DeploymentSpec>, DeploymentsFileProblem> {
    let content: FileContent =
        serde_saphyr::from_str(text).map_err(|error| DeploymentsFileProblem::Syntax(error.to_string()))?;
    if content.deployments.len() > MAX_DEPLOYMENTS {
        return Err(DeploymentsFileProblem::TooMany(content.deployments.len()));
    }
    let mut used = UsedNames::default();
    let mut deployments = Vec::with_capacity(content.deployments.len());
    for (index, value) in content.deployments.into_iter().enumerate() {
        let named = match (value["namespace"].as_str(), value["name"].as_str()) {
            (Some(namespace), Some(name)) => format!("{namespace}/{name}"),
            _ => format!("number {}", index + 1),
        };
        let checked = check(value).and_then(|deployment| {
            used.add(&deployment)?;
            Ok(deployment)
        });
        let in_file =
            |problem| DeploymentsFileProblem::Deployment { deployment: named, problem: Box::new(problem) };
        deployments.push(checked.map_err(in_file)?);
    }
    Ok(deployments)
}

fn check(value: Value) -> Result<DeploymentSpec, InvalidDeployment> {
    let content: DeploymentContent = serde_json::from_value(value).map_err(InvalidDeployment::Member)?;
    for (member, value) in [("name", &content.name), ("namespace", &content.namespace)] {
        if !is_label(value) {
            return Err(InvalidDeployment::Name { member, value: value.clone() });
        }
    }
    if content.gateways.is_empty() || content.gateways.len() > MAX_GATEWAY_URLS {
        return Err(InvalidDeployment::GatewayCount);
    }
    let gateways = content.gateways.iter().map(|url| gateway(url)).collect::<Result<_, _>>()?;
    let scale = match (content.scale.prefill, content.scale.decode, content.scale.plain) {
        (Some(prefill), Some(decode), None) => {
            ScaleTargets::Pair { prefill: prefill.parse()?, decode: decode.parse()? }
        }
        (None, None, Some(plain)) => ScaleTargets::Plain { plain: plain.parse()? },
        _ => return Err(InvalidDeployment::Roles),
    };
    if content.decode_kv_tokens == Some(0) {
        return Err(InvalidDeployment::NoKvTokens);
    }
    check_settings(&content.settings, &scale)?;
    Ok(DeploymentSpec {
        key: DeploymentKey { namespace: content.namespace, name: content.name },
        gateways,
        scale,
        decode_kv_tokens: content.decode_kv_tokens,
        settings: content.settings,
    })
}

fn gateway(url: &str) -> Result<Url, InvalidDeployment> {
    let invalid = |problem: String| InvalidDeployment::Gateway { url: url.to_owned(), problem };
    let parsed = Url::parse(url).map_err(|error| invalid(error.to_string()))?;
    match (parsed.scheme(), parsed.host_str()) {
        ("http" | "https", Some(_)) if parsed.username().is_empty() && parsed.password().is_none() => {
            Ok(parsed)
        }
        ("http" | "https", Some(_)) => Err(invalid("it has a user or a password".to_owned())),
        _ => Err(invalid("neither http:// nor https://".to_owned())),
    }
}

fn check_settings(settings: &PlannerSettings, scale: &ScaleTargets) -> Result<(), InvalidDeployment> {
    settings.validate()?;
    if !INTERVALS.contains(&settings.interval_s) {
        return Err(InvalidDeployment::Interval(settings.interval_s));
    }
    if settings.flip.is_some() {
        return Err(InvalidDeployment::Flip);
    }
    if let ScaleTargets::Plain { .. } = scale {
        let bounds = |role: &RoleSettings| (role.min, role.max, role.night_min);
        if bounds(&settings.prefill) != bounds(&settings.decode) {
            return Err(InvalidDeployment::PlainBounds("min, max and night_min"));
        }
        if settings.gpu_budget.is_some() {
            return Err(InvalidDeployment::PlainBudget);
        }
    }
    Ok(())
}

/// Names that only one deployment may have.
#[derive(Default)]
struct UsedNames {
    keys: BTreeMap<DeploymentKey, ()>,
    gateways: BTreeMap<Url, DeploymentKey>,
    targets: BTreeMap<(String, ScaleTarget), DeploymentKey>,
}

impl UsedNames {
    fn add(&mut self, deployment: &DeploymentSpec) -> Result<(), InvalidDeployment> {
        let key = &deployment.key;
        if self.keys.insert(key.clone(), ()).is_some() {
            return Err(InvalidDeployment::Duplicate);
        }
        for url in &deployment.gateways {
            if let Some(other) = self.gateways.insert(url.clone(), key.clone()) {
                return Err(InvalidDeployment::SharedGateway { url: url.clone(), other: other.to_string() });
            }
        }
        for (_, target) in deployment.scale.roles() {
            let place = (key.namespace.clone(), target.clone());
            if let Some(other) = self.targets.insert(place, key.clone()) {
                return Err(InvalidDeployment::SharedTarget {
                    target: target.clone(),
                    other: other.to_string(),
                });
            }
        }
        Ok(())
    }
}

fn is_label(text: &str) -> bool {
    let is_in_label = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=63).contains(&text.len())
        && text.bytes().all(is_in_label)
        && !text.starts_with('-')
        && !text.ends_with('-')
}

impl fmt::Display for DeploymentKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.namespace, self.name)
    }
}

impl ScaleTargets {
    /// The roles that are scaled, each with its target.
    pub(crate) fn roles(&self) -> Vec<(ScaledRole, &ScaleTarget)> {
        match self {
            Self::Pair { prefill, decode } => {
                vec![(ScaledRole::Prefill, prefill), (ScaledRole::Decode, decode)]
            }
            Self::Plain { plain } => vec![(ScaledRole::Plain, plain)],
        }
    }

    /// Roles of the engines that compute prompts, and of those that generate.
    pub(crate) fn engine_roles(&self) -> (ScaledRole, ScaledRole) {
        match self {
            Self::Pair { .. } => (ScaledRole::Prefill, ScaledRole::Decode),
            Self::Plain { .. } => (ScaledRole::Plain, ScaledRole::Plain),
        }
    }
}

impl ScaledRole {
    pub(crate) const ALL: [Self; 3] = [Self::Prefill, Self::Decode, Self::Plain];

    pub(crate) fn name(self) -> &'static str {
        match self {
            Self::Prefill => "prefill",
            Self::Decode => "decode",
            Self::Plain => "plain",
        }
    }

    pub(crate) fn from_name(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|role| role.name() == name)
    }
}

#[cfg(test)]
mod tests;
