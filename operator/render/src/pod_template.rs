//! Renders the pod templates of a role: resolved, with everything that the group adds.

use rbg_api::v1alpha2::{InstanceComponent, LeaderWorkerPattern, TemplateRef};
use rbg_api::{PodTemplate, keys, merge};
use serde_json::{Value, json};

use crate::affinity::ForeignPodKind;
use crate::error::RenderError;
use crate::manifest::StringMap;
use crate::role::{ResolvedRole, RolePattern};
use crate::workload_kind::{PreservedFields, WorkloadKind};
use crate::{affinity, canonical, environment, gang, legacy, role_environment, runtime_profile, topology};

const VOLUME: &str = "rbg-cluster-config";
const MOUNT_PATH: &str = "/etc/rbg";
const FILE: &str = "config.yaml";

/// What to add to a pod template.
#[derive(Debug, Clone, Copy)]
struct TemplateInjection {
    discovery_file: bool,
    /// Add the containers of the role's runtime profiles.
    runtimes: bool,
    /// Add the variables of leaders and workers.
    leader_worker: bool,
}

/// Renderer of one role's pod templates.
pub(crate) struct PodTemplates<'r, 'a> {
    role: &'r ResolvedRole<'a>,
    labels: StringMap,
}

type LabelPair = (&'static str, String);

impl<'r, 'a> PodTemplates<'r, 'a> {
    /// Creates a renderer of templates with these labels.
    pub(crate) fn new(role: &'r ResolvedRole<'a>, labels: StringMap) -> Self {
        Self { role, labels }
    }

    /// Template of a role whose instances are single pods.
    pub(crate) fn single(&self, labels: &[LabelPair]) -> Result<PodTemplate, RenderError> {
        self.render(self.base()?, role_injection(self.role), labels)
    }

    pub(crate) fn leader(
        &self,
        pattern: &LeaderWorkerPattern,
        labels: &[LabelPair],
    ) -> Result<PodTemplate, RenderError> {
        let template =
            self.apply_patch(self.base()?, "leaderTemplatePatch", pattern.leader_template_patch.as_ref())?;
        self.render(template, TemplateInjection { leader_worker: true, ..role_injection(self.role) }, labels)
    }

    pub(crate) fn worker(
        &self,
        pattern: &LeaderWorkerPattern,
        labels: &[LabelPair],
    ) -> Result<PodTemplate, RenderError> {
        let template =
            self.apply_patch(self.base()?, "workerTemplatePatch", pattern.worker_template_patch.as_ref())?;
        let injection =
            TemplateInjection { leader_worker: true, runtimes: false, ..role_injection(self.role) };
        self.render(template, injection, labels)
    }

    pub(crate) fn component(&self, component: &InstanceComponent) -> Result<PodTemplate, RenderError> {
        let mut template = component.template.clone();
        template.set_annotations(&component.annotations);
        template.set_labels(&component.labels);
        let size = (keys::COMPONENT_SIZE, component.size().to_string());
        self.render(template, role_injection(self.role), &[size])
    }

    /// Template of a pod of an external workload.
    pub(crate) fn external_pod(&self, preserved: &PreservedFields) -> Result<PodTemplate, RenderError> {
        self.render_external(self.base()?, role_injection(self.role), preserved, ForeignPodKind::Single)
    }

    pub(crate) fn external_leader(
        &self,
        pattern: &LeaderWorkerPattern,
        preserved: &PreservedFields,
    ) -> Result<PodTemplate, RenderError> {
        let template =
            self.apply_patch(self.base()?, "leaderTemplatePatch", pattern.leader_template_patch.as_ref())?;
        self.render_external(template, role_injection(self.role), preserved, ForeignPodKind::Leader)
    }

    pub(crate) fn external_worker(
        &self,
        pattern: &LeaderWorkerPattern,
        preserved: &PreservedFields,
    ) -> Result<PodTemplate, RenderError> {
        let template =
            self.apply_patch(self.base()?, "workerTemplatePatch", pattern.worker_template_patch.as_ref())?;
        let injection = TemplateInjection { runtimes: false, ..role_injection(self.role) };
        self.render_external(template, injection, preserved, ForeignPodKind::Worker)
    }

    /// Adds what our own pods get when they are created.
    fn render_external(
        &self,
        template: PodTemplate,
        injection: TemplateInjection,
        preserved: &PreservedFields,
        pod_kind: ForeignPodKind,
    ) -> Result<PodTemplate, RenderError> {
        let role = self.role;
        let mut template = self.render(template, injection, &[])?;
        if role.is_legacy(preserved) {
            template.set_labels(&legacy_labels(role));
            legacy::add_environment(&mut template);
        }
        if let Some(topology) = role.topology(preserved)? {
            affinity::add_external_pod_affinity(
                &mut template,
                &topology,
                (role.group.name, &role.spec.name),
                pod_kind,
            );
        }
        Ok(template)
    }

    /// The role's template, or its role template with the patch applied.
    fn base(&self) -> Result<PodTemplate, RenderError> {
        let (template, reference) = match self.role.pattern {
            RolePattern::Standalone(pattern) => (&pattern.template, &pattern.template_ref),
            RolePattern::LeaderWorker(pattern) => (&pattern.template, &pattern.template_ref),
            RolePattern::Custom(_) => (&None, &None),
        };
        match (reference, template) {
            (Some(reference), _) => self.resolve_reference(reference),
            (None, Some(template)) => Ok(template.clone()),
            (None, None) => Err(RenderError::NoTemplate(self.role.spec.name.clone())),
        }
    }

    fn resolve_reference(&self, reference: &TemplateRef) -> Result<PodTemplate, RenderError> {
        let role = &self.role.spec.name;
        let mut templates = self.role.group.object.spec.role_templates.iter();
        let is_named = templates.find(|template| template.name == reference.name);
        let is_named = is_named.ok_or_else(|| RenderError::UnknownTemplate {
            role: role.clone(),
            template: reference.name.clone(),
        })?;
        self.apply_patch(is_named.template.clone(), "templateRef.patch", reference.patch.as_ref())
    }

    fn apply_patch(
        &self,
        template: PodTemplate,
        name: &'static str,
        patch: Option<&Value>,
    ) -> Result<PodTemplate, RenderError> {
        merge::pod_template(&template, patch).map_err(|cause| RenderError::Patch {
            role: self.role.spec.name.clone(),
            patch: name,
            cause,
        })
    }

    fn render(
        &self,
        mut template: PodTemplate,
        injection: TemplateInjection,
        labels: &[LabelPair],
    ) -> Result<PodTemplate, RenderError> {
        let role = self.role;
        if injection.discovery_file {
            mount_discovery_file(&mut template, role.group.name);
        }
        if injection.runtimes {
            runtime_profile::inject(role, &mut template)?;
            inject_update_annotations(role, &mut template);
        }
        environment::inject(&mut template, role_environment::role_variables(role));
        if injection.leader_worker {
            environment::inject(&mut template, role_environment::leader_worker_variables(role));
        }
        topology::inject(role, &mut template);
        gang::inject(role.group, &role.spec.name, &mut template);
        template.set_labels(&self.labels);
        let labels: StringMap =
            labels.iter().map(|(key, value)| ((*key).to_owned(), value.clone())).collect();
        template.set_labels(&labels);
        Ok(canonical::pod_template(template))
    }
}

/// What every pod of the role gets.
fn role_injection(role: &ResolvedRole<'_>) -> TemplateInjection {
    TemplateInjection { discovery_file: role.is_ordered(), runtimes: true, leader_worker: false }
}

/// Labels of v1alpha1 for pods of external workloads.
fn legacy_labels(role: &ResolvedRole<'_>) -> StringMap {
    legacy::labels(role.group.name, &role.spec.name, &role.group.unique_key())
}

/// Copies annotations about updates from the role to its pods, for the controller that restarts them. Annotations of the
/// template take precedence. For pulling images, the group's annotation is the default of its roles.
fn inject_update_annotations(role: &ResolvedRole<'_>, template: &mut PodTemplate) {
    if role.kind() != WorkloadKind::RoleInstanceSet {
        return;
    }
    let group_annotation = |key| role.group.object.metadata.annotations.as_ref()?.get(key);
    let sources = [
        (keys::UPGRADE_HOOKS, None),
        (keys::UPGRADE_TIMEOUT, None),
        (keys::PRE_PULL, group_annotation(keys::PRE_PULL)),
        (keys::PRE_PULL_TIMEOUT, group_annotation(keys::PRE_PULL_TIMEOUT)),
    ];
    let missing: StringMap = sources
        .into_iter()
        .filter(|(key, _)| template.annotation(key).is_none())
        .filter_map(|(key, group_annotation)| {
            let value = role.spec.annotations.get(key).or(group_annotation)?;
            Some((key.to_owned(), value.clone()))
        })
        .collect();
    template.set_annotations(&missing);
}

fn mount_discovery_file(template: &mut PodTemplate, config_map: &str) {
    let is_named = |item: &Value| item.get("name").and_then(Value::as_str) == Some(VOLUME);
    let volumes = template.list_mut("volumes");
    if !volumes.iter().any(is_named) {
        let items = json!([{ "key": FILE, "path": FILE }]);
        volumes.push(json!({ "name": VOLUME, "configMap": { "name": config_map, "items": items } }));
    }
    for container in template.list_mut("containers").iter_mut().filter_map(Value::as_object_mut) {
        let mounts = rbg_api::template::member_list(container, "volumeMounts");
        if !mounts.iter().any(|mount| is_named(mount) && mount.get("mountPath") == Some(&MOUNT_PATH.into())) {
            mounts.push(json!({ "name": VOLUME, "mountPath": MOUNT_PATH, "readOnly": true }));
        }
    }
}
